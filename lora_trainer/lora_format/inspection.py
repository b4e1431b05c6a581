"""Inspect a LoRA file as far as it can be read, also files that are damaged or of other programs."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from torch import Tensor

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.tensorfile import LARGEST_HEADER, METADATA, check_places, hash_of_tensors, read_tensor_header
from lora_trainer.lora_format.convert import size_of_update
from lora_trainer.lora_format.diffusers import ADAPTER_METADATA_KEY
from lora_trainer.lora_format.keys import EMBEDDING, NUMBERED, PEFT, read_key
from lora_trainer.lora_format.kinds import KINDS, NETWORKS
from lora_trainer.lora_format.layer_updates import titles
from lora_trainer.lora_format.reading import (
    Collected,
    beside,
    collect,
    method_of,
    open_tensors,
    refuse_reaching,
    some,
    values,
)
from lora_trainer.lora_format.tensor_file import DTYPES

if TYPE_CHECKING:
    from lora_trainer.lora_format.layer_updates import LayerUpdate
    from lora_trainer.lora_format.layouts import Names
    from lora_trainer.lora_format.weights import AdapterWeights

NESTED = re.compile(r"(?:transformer|unet)\.diffusion_model\.|(?:lora_unet|lora_transformer|lycoris)_(?:_|unet_)")
WITHOUT_DOT = re.compile(r"_lora_(?:down|up|mid)\.weight")
OF_XLABS = re.compile(r"\.processor\.(?:qkv|proj)_lora")
COUNTED_BY = {part for kind in KINDS.values() for part in kind.counted_by}
BLOCK = re.compile(r"(.*?\.\d+)\.")


@dataclass(frozen=True)
class Component:
    """One part of the pipeline: how many modules, and the size of the updates of each block, in order."""

    modules: int
    norm: float
    blocks: Mapping[str, float]


@dataclass(frozen=True)
class Inspected:
    """The content of a file. `style` is how the file names its modules; `hashes` are (recorded, computed)."""

    path: Path
    kind: str  # `LoRA`, `rank-stabilized LoRA`, …
    style: str
    weights: AdapterWeights
    ranks: Mapping[int, int]  # rank -> modules
    scales: Mapping[float, int]  # alpha / rank -> modules
    dtypes: Mapping[str, int]
    convolutions: int
    components: Mapping[str, Component]
    hashes: Mapping[str, tuple[str, str]]
    errors: Sequence[Problem] = ()  # programs would load the file wrongly, or not at all
    warnings: Sequence[Problem] = ()
    tensors: int = 0
    alpha_keys: bool = False  # alpha has tensors of its own
    numbered: bool = False  # the first text encoder's keys have a number, as where there are several
    learned_tokens: Sequence[str] = field(default=())
    keys: Sequence[str] = ()  # in the order of their bytes; none of a damaged file


def inspect(path: Path, families: Sequence[Names]) -> Inspected:
    """Inspect a LoRA file. Raises UsageError for other files, saying what they are."""
    problems: list[Problem] = []
    peft_config, whole = None, True
    try:
        tensors, metadata = open_tensors(path)
    except UsageError as error:
        salvaged = _salvaged(path)
        if salvaged is None:
            raise
        problems += error.problems
        (tensors, metadata), whole = salvaged, False
    understood = metadata
    try:
        refuse_reaching(path, metadata, tensors)
        peft_config = beside(path, tensors)
    except UsageError as error:
        problems += error.problems
        understood = {key: value for key, value in metadata.items() if key != ADAPTER_METADATA_KEY}
    found = collect(path.name, tensors, understood, families, peft_config)
    if not found.weights.modules and not found.form:
        raise UsageError(problems or found.problems)  # damage may hide the LoRA
    problems += found.problems
    pairs = found.weights.modules
    hashes = hashes_of(path, metadata) if whole else {}
    places = {key: entry for key, entry in read_tensor_header(path).items() if key != METADATA} if whole else {}
    errors, warnings = _doubts(path, found.weights, hashes)
    counted = [key for key in tensors if (read := read_key(key)) and read.part in COUNTED_BY]
    return Inspected(
        path=path,
        kind=method_of(tensors) or _kind(metadata, found.weights),
        style=_style(list(tensors), found),
        weights=replace(found.weights, metadata=metadata),
        ranks=dict(Counter(pair.rank for pair in pairs.values())),
        scales=dict(Counter(round(pair.scale, 6) for pair in pairs.values())),
        dtypes=dict(Counter(str(tensors[key].dtype).removeprefix("torch.") for key in counted)),
        convolutions=sum(map(_has_kernel, pairs.values())),
        components=_components(pairs),
        hashes=hashes,
        errors=(*problems, *errors),
        warnings=tuple(warnings),
        tensors=len(tensors),
        alpha_keys=any(key.endswith(".alpha") for key in tensors),
        numbered=any(key.startswith(NUMBERED) for key in tensors),
        learned_tokens=sorted({name.partition(".")[0] for name in found.weights.embeddings}),
        keys=sorted(places, key=lambda key: places[key]["data_offsets"]),
    )


def _salvaged(path: Path) -> tuple[dict[str, Tensor], dict[str, str]] | None:
    """The complete tensors of a damaged file, if its header can be read; else None."""
    if not path.is_file() or path.suffix.lower() != ".safetensors":
        return None
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= LARGEST_HEADER:
                return None
            header: Any = json.loads(file.read(length))
            entries = {name: entry for name, entry in header.items() if name != METADATA}
            if not any(read_key(name) for name in entries):  # a base model may be large
                return None
            promised = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
            check_places(path, header, promised)  # the header itself must be sound
            there = path.stat().st_size - 8 - length
            whole = {name: entry for name, entry in entries.items() if entry["data_offsets"][1] <= there}
            return {name: _tensor(file, 8 + length, entry) for name, entry in whole.items()}, header.get(METADATA, {})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, UsageError):
        return None


def _tensor(file: BinaryIO, data: int, entry: Mapping[str, Any]) -> Tensor:
    begin, end = entry["data_offsets"]
    file.seek(data + begin)
    flat = torch.frombuffer(bytearray(file.read(end - begin)), dtype=torch.uint8) if end > begin else torch.empty(0)
    return flat.view(DTYPES[entry["dtype"]]).reshape(entry["shape"])


def _kind(metadata: Mapping[str, str], weights: AdapterWeights) -> str:
    rank_stabilized = '"rank_stabilized": true' in metadata.get("ss_network_args", "") or bool(
        re.search(r'"use_rslora": true', metadata.get("lora_adapter_metadata", ""))
    )
    kind = titles(list(weights.modules.values())) or "LoRA"
    if rank_stabilized:
        kind = f"rank-stabilized {kind}"
    if any(map(_has_kernel, weights.modules.values())):
        kind += " with convolutions"
    return f"{kind} and learned tokens" if weights.embeddings else kind


@dataclass(frozen=True)
class _FileNames:
    """How a file names its layers: `by_diffusers` and `by_original` where that shows whose names a transformer's are."""

    keys: Sequence[str]
    form: str
    by_diffusers: bool
    by_original: bool
    is_fused_by_diffusers: bool

    def any_begins(self, *beginnings: str) -> bool:
        return any(key.startswith(beginnings) for key in self.keys)

    def any_has(self, *parts: str) -> bool:
        return any(part in key for key in self.keys for part in parts)

    @property
    def is_foreign(self) -> bool:
        return any(NESTED.match(key.removeprefix(PEFT)) or WITHOUT_DOT.search(key) for key in self.keys)

    @property
    def is_old(self) -> bool:
        return self.form == "old"

    @property
    def is_old_by_layer(self) -> bool:
        return self.is_old and any(key.startswith("unet.") and "_lora." not in key for key in self.keys)

    @property
    def is_peft(self) -> bool:
        return all(key.startswith(PEFT) for key in self.keys)

    @property
    def is_kohya(self) -> bool:
        return self.form in ("kohya", "lycoris") and all(key.startswith(("lora_", EMBEDDING)) for key in self.keys)


ORIGINAL, DIFFUSERS = ("diffusion_model.", "text_encoders."), ("unet.", "transformer.", "text_encoder")
FIRST_CODE = ("_input_blocks_", "_output_blocks_", "_middle_block_")
HALVES = "{halves}"  # in words: that the tensors are named as kohya's
# How the denoiser's keys are named, or those that there are: the first of these that is so.
STYLES: tuple[tuple[Callable[[_FileNames], bool], str], ...] = (
    (lambda names: names.is_foreign, "names of no known program"),
    (lambda names: names.is_old and any(map(OF_XLABS.search, names.keys)), "XLabs"),
    (lambda names: names.is_old and not names.any_begins("unet.", "text_encoder"), "old diffusers, no prefix"),
    (lambda names: names.is_old_by_layer, "old diffusers, by layer"),
    (lambda names: names.is_old, "old diffusers"),
    (lambda names: names.is_fused_by_diffusers, "fused as diffusers fuses it"),
    (lambda names: names.is_peft and names.by_original, f"peft, original names{HALVES}"),
    (lambda names: names.is_peft, "peft"),
    (lambda names: names.any_has(PEFT), "peft inside"),
    (lambda names: names.any_begins(*ORIGINAL) and names.by_diffusers, f"original, diffusers' names{HALVES}"),
    (lambda names: names.any_begins(*ORIGINAL), f"original{HALVES}"),
    (lambda names: names.any_begins("model.diffusion_model."), "original, model first"),
    (lambda names: names.any_begins(*DIFFUSERS) and names.by_original, f"diffusers, original names{HALVES}"),
    (lambda names: names.any_begins(*DIFFUSERS), f"diffusers{HALVES}"),
    (lambda names: names.any_begins("lora_transformer_"), "OneTrainer"),
    (lambda names: names.any_begins("lycoris_"), "LyCORIS"),
    *((lambda names, own=each: names.any_begins(f"{own.prefix}_"), each.style) for each in NETWORKS),
    (lambda names: not names.is_kohya and names.by_original, "original, no prefix"),
    (lambda names: not names.is_kohya, "no prefix"),
    (lambda names: names.any_has(*FIRST_CODE), "kohya, first code"),
    (lambda names: names.by_diffusers, "kohya, diffusers' names"),
    (lambda names: True, "kohya"),
)


def _style(keys: Sequence[str], found: Collected) -> str:
    """How the denoiser's keys are named, or those that there are."""
    rules = [rule for place in found.names.values() for rule in place.rules]
    ours = any(place.modules[0].startswith("transformer.") and not place.rules for place in found.names.values())
    theirs = not ours and any(rule.ours != rule.original for rule in rules)
    fused = any(rule.original.endswith(".to_qkv") for rule in rules)
    names = _FileNames(keys, found.form, ours, theirs, fused)
    style = next(words for holds, words in STYLES if holds(names))
    return style.format(halves=", kohya's halves" if found.form == "kohya" else "")


def _has_kernel(update: LayerUpdate) -> bool:
    shape = update.weight_shape
    return len(shape) == 4 and shape[-1] > 1


def _components(pairs: Mapping[str, LayerUpdate]) -> dict[str, Component]:
    sizes: dict[str, dict[str, list[float]]] = {}
    for module, pair in pairs.items():
        component, _, rest = module.partition(".")
        match = BLOCK.match(f"{rest}.")
        block = match[1] if match else rest.partition(".")[0]
        sizes.setdefault(component, {}).setdefault(block, []).append(size_of_update(pair))
    return {
        component: Component(
            sum(map(len, blocks.values())),
            math.hypot(*(size for each in blocks.values() for size in each)),
            {block: math.hypot(*each) for block, each in sorted(blocks.items(), key=lambda item: _order(item[0]))},
        )
        for component, blocks in sorted(sizes.items())
    }


def _order(block: str) -> list[tuple[int, str]]:
    """Blocks in the order of the forward pass: down, middle, up; numbers by their value."""
    places = {"down_blocks": "0", "mid_block": "1", "up_blocks": "2", "transformer_blocks": "0"}
    return [(int(part), "") if part.isdigit() else (0, places.get(part, part)) for part in block.split(".")]


def _doubts(path: Path, weights: AdapterWeights, hashes: Mapping[str, tuple[str, str]]) -> tuple[list[Problem], ...]:
    """What is wrong with the numbers of a file that can be read, and what may be."""
    errors, warnings = values(path.name, weights), list[Problem]()
    updates = weights.modules
    dead = [name for name, update in updates.items() if update.is_zero]
    if dead and len(dead) == len(updates):
        message = f"{path.name} changes nothing: every update is zero."
        errors.append(Problem("lora_is_zero", message, "It was not trained."))
    elif dead:
        message = f"{len(dead)} of {len(updates)} modules are zero ({some(dead)})."
        warnings.append(Problem("modules_are_zero", message, "They learned nothing."))
    if zero := [name for name, update in updates.items() if update.alpha == 0]:
        message = f"alpha is 0 for {len(zero)} modules ({some(zero)})."
        fix = "ComfyUI and diffusers take it as it is, sd-scripts as alpha = rank."
        warnings.append(Problem("alpha_is_zero", message, fix))
    for name, (recorded, found) in hashes.items():
        if recorded != found:
            message = f"{name} is {recorded[:12]}, the content's hash is {found[:12]}."
            warnings.append(Problem("hash_differs", message, "It was changed after it was written."))
    return errors, warnings


def hashes_of(path: Path, metadata: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """`sshs_model_hash`: as the header records it, and computed from the bytes after the header."""
    recorded = metadata.get("sshs_model_hash", "")
    if not recorded:
        return {}
    read_tensor_header(path)
    found = hash_of_tensors(path).removeprefix("0x")
    return {"sshs_model_hash": (recorded, found[: len(recorded)])}
