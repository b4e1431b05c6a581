"""The LoRA files that a tool reads, whichever program wrote them, and the file that it writes."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lora_trainer.core.errors import Problem, UsageError, gathering
from lora_trainer.core.findings import counted
from lora_trainer.core.io import sha256_file
from lora_trainer.lora_format.convert import EARLIER, Form, SourceFile
from lora_trainer.lora_format.kinds import KINDS, REWRITTEN
from lora_trainer.lora_format.kinds.lora import LoraPair
from lora_trainer.lora_format.metadata import network_entries
from lora_trainer.lora_format.reading import only_lora, some, values
from lora_trainer.lora_format.weights import AdapterWeights, LoraWeights, plain_pairs
from lora_trainer.lora_tools.combining import Combined, cast_for_storage
from lora_trainer.models.lora_names import families_of, names_for, read_source, write_source, write_weights

if TYPE_CHECKING:
    from lora_trainer.lora_format.layer_updates import LayerUpdate
    from lora_trainer.lora_format.low_rank import LayerRow

ORIGIN = "lora_trainer.origin"  # header: the command that made a file, and the files that it read
MERGED_FROM, COMMENT = "modelspec.merged_from", "ss_training_comment"
BASE_VERSION = ("ss_base_model_version", "ss_v2")
TRIGGER = "modelspec.trigger_phrase"
MODULE, ARGUMENTS = "ss_network_module", "ss_network_args"
PLAIN_LORA = "networks.lora"  # sd-scripts' modules of plain LoRAs begin so: `networks.lora_flux`
# Network arguments on ranks, alphas and the kind, which a tool changes, of sd-scripts, LyCORIS and this program.
OF_OTHER_WEIGHTS = re.compile(
    r"(conv_|text_encoder_|conv_block_|block_)(dims?|alphas?)|algo|factor|decompose_both|use_tucker|use_cp|full_matrix"
    r"|alpha_folded|rank_stabilized|rs_lora|use_scalar"
)
KIND_ARGUMENTS = {key for kind in KINDS.values() for key in kind.update.arguments}


@dataclass(frozen=True)
class LoraInput:
    """A LoRA file that was read."""

    path: Path
    file: SourceFile

    @property
    def weights(self) -> AdapterWeights:
        return self.file.weights

    @property
    def pairs(self) -> LoraWeights:
        """The weights of a plain LoRA. Raises UsageError for other kinds."""
        return only_lora(self.path.name, self.file.weights)


@dataclass(frozen=True)
class LoraTarget:
    """The file to write. `to` and `dtype` are those of the first input, `named` in messages, where they are None; `family`
    is the user's."""

    path: Path
    named: Path
    to: Form | None = None
    dtype: torch.dtype | None = None
    family: str | None = None


@dataclass(frozen=True)
class ToolResult:
    """What a tool wrote: the files, each layer's row, and notes."""

    paths: tuple[Path, ...]
    layers: tuple[LayerRow, ...]
    notes: tuple[str, ...] = ()

    @property
    def worst(self) -> LayerRow:
        """The layer with the largest error."""
        return max(self.layers, key=lambda layer: layer.error)

    @property
    def error(self) -> float:
        """That of all layers together, as a share of the norm of all changes."""
        lost, whole = (
            math.hypot(*each) for each in zip(*((row.error * row.norm, row.norm) for row in self.layers), strict=True)
        )
        return lost / whole if whole else 0.0


def read_inputs(paths: Sequence[Path], *, any_kind: bool = False) -> list[LoraInput]:
    """The LoRA files, or with `any_kind` those of every readable kind.

    Raises UsageError with all problems of all files: damage, other kinds, NaN, two families, other shapes.
    """
    problems: list[Problem] = []
    found: list[LoraInput] = []
    for path in paths:
        with gathering(problems):
            found.append(LoraInput(path, read_source(path)))
    for each in found:
        problems += values(each.path.name, each.weights)
        if not any_kind:
            with gathering(problems):
                only_lora(each.path.name, each.weights)
    problems += [] if problems else differences(found)
    if problems:
        raise UsageError(problems)
    return found


def differences(inputs: Sequence[LoraInput]) -> list[Problem]:
    """Why files cannot be combined: they are for two families, or have layers of other sizes, or the same learned token."""
    by_family: dict[str, list[str]] = {}
    for each in inputs:
        if found := families_of(each.weights):
            by_family.setdefault(" or ".join(found), []).append(each.path.name)
    if len(by_family) > 1 and not set.intersection(*({*kin.split(" or ")} for kin in by_family)):
        listed = "; ".join(f"{some(files)}: {family}" for family, files in by_family.items())
        message = f"The files are for {len(by_family)} families of models ({listed})."
        return [
            Problem(
                "loras_of_several_families",
                message,
                "Combine files of one family: a layer of one is none of the other.",
            )
        ]
    problems, shapes, tokens = [], dict[str, tuple[Path, tuple[int, ...]]](), dict[str, tuple[Path, torch.Tensor]]()
    for each in inputs:
        unlike = [
            name
            for name, pair in each.weights.modules.items()
            if isinstance(pair, LoraPair)  # others may not tell all sides
            and shapes.setdefault(name, (each.path, pair.weight_shape))[1] != pair.weight_shape
        ]
        if unlike:
            path, shape = shapes[unlike[0]]
            ours = each.weights.modules[unlike[0]].weight_shape
            message = (
                f"{each.path.name} has {counted(len(unlike), 'layer')} of other sizes than {path.name}: "
                f"{unlike[0]} is {list(ours)} and {list(shape)}."
            )
            problems.append(Problem("layers_differ", message, "Combine files for one base model."))
        for word, tensor in each.weights.embeddings.items():
            path, other = tokens.setdefault(word, (each.path, tensor))
            if path != each.path and not torch.equal(tensor, other):
                message = f"{each.path.name} and {path.name} have the learned token {word.partition('.')[0]} with other values."
                problems.append(Problem("tokens_differ", message, "Rename it in one of them, or leave it out."))
    return problems


def with_weight(
    inputs: Sequence[LoraInput], weights: Sequence[float]
) -> tuple[list[LoraInput], list[float], tuple[str, ...]]:
    """The files whose weight is not 0, their weights, and a note on the others: these give neither layers nor learned tokens."""
    used = [(each, weight) for each, weight in zip(inputs, weights, strict=True) if weight]
    others = [each.path.name for each, weight in zip(inputs, weights, strict=True) if not weight]
    notes = (f"left out, with weight 0: {', '.join(others)}",) if others else ()
    return [each for each, _ in used], [weight for _, weight in used], notes


def common_header(inputs: Sequence[LoraInput]) -> dict[str, str]:
    """The header entries that all files share; of one file, all of them."""
    first, *others = (each.weights.metadata for each in inputs)
    return {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}


def origin_of(command: str, inputs: Sequence[LoraInput], **details: Any) -> dict[str, str]:
    """The header entry that says how a file was made: names and hashes of the files, without their folders."""
    files = [{"name": each.path.name, "sha256": sha256_file(each.path)} for each in inputs]
    document = {"command": command, "files": files, **{key: each for key, each in details.items() if each is not None}}
    return {ORIGIN: json.dumps(document, sort_keys=True)}


def write_result(combined: Combined, like: SourceFile, header: Mapping[str, str], target: LoraTarget) -> ToolResult:
    """Write a tool's result as a LoRA file, in the format and type of `like` unless the target has others.

    `header` are the entries to carry on; rank, alpha, name and hashes are those of the new file. Raises UsageError, and
    writes nothing, for what the format cannot hold.
    """
    to = target.to or like.form
    header = {key: value for key, value in header.items() if key != EARLIER and key not in REWRITTEN}
    weights = combined.weights
    names = names_for(target.named, weights, target.family, like.numbered)
    ready = cast_for_storage(
        combined, target.dtype or usual_dtype(like.weights), one_alpha=to == "kohya" and not names.layout
    )
    file = SourceFile(replace(ready.weights, metadata=dict(header)), to, like.numbered)
    named = bool(set(header) & set(BASE_VERSION)) or weights.family is not None or target.family is not None
    if named:  # A1111 takes any header that does not name its base model for one of SD1
        file = replace(file, weights=replace(file.weights, metadata=_described(header, ready, target.path)))
    written = write_source(file, target.path, to, family=target.family)
    return ToolResult(written.paths, ready.layers, written.notes)


def write_changes(
    weights: AdapterWeights, layers: Sequence[LayerRow], like: SourceFile, header: Mapping[str, str], target: LoraTarget
) -> ToolResult:
    """Write changes of any kind as `write_result` writes a LoRA.

    Of other kinds the rows keep their errors; those without one get that of rounding, with magnitudes that of what these scale.
    """
    if (pairs := plain_pairs(weights)) is not None:
        return write_result(Combined(pairs, tuple(layers), {}), like, header, target)
    dtype = target.dtype or usual_dtype(like.weights)
    rounded = replace(weights, modules={name: each.rounded(dtype) for name, each in weights.modules.items()})
    entries = {key: str(each) for key, each in network_entries(rounded, {}).items()}
    names = {"ss_output_name": target.path.stem, "modelspec.title": target.path.stem}
    arguments = json.loads(header.get(ARGUMENTS, "{}")) | json.loads(entries[ARGUMENTS])
    entries[ARGUMENTS] = json.dumps(arguments, sort_keys=True)
    paths = write_weights(
        replace(rounded, metadata={**header, **entries, **names}),
        target.path,
        target.to or like.form,
        family=target.family,
        numbered=like.numbered,
        dtype=dtype,
    )
    rows = tuple(
        each if each.error else replace(each, error=rounding_error(weights.modules[each.name], dtype))
        for each in layers
    )
    return ToolResult(paths, rows)


def rounding_error(update: LayerUpdate, dtype: torch.dtype) -> float:
    """How far a change moves where it is stored in a type, as a share of it. 0 of one that the base model's weight decides."""
    update = update.without_weight()
    size = 0.0 if update.needs_weight else update.norm
    return float((update.rounded(dtype).delta() - update.delta().cpu()).norm()) / size if size else 0.0


def _described(header: Mapping[str, str], combined: Combined, path: Path) -> dict[str, str]:
    pairs = combined.weights.modules
    denoiser = [pair for name, pair in pairs.items() if not name.startswith("text_encoder")] or list(pairs.values())
    most: Any = Counter((pair.rank, pair.alpha) for pair in denoiser).most_common(1)
    rank, alpha = most[0][0] if most else (0, 0.0)
    return {
        **header,
        **_network(header),
        "ss_network_dim": str(rank),
        "ss_network_alpha": str(alpha),
        "ss_output_name": path.stem,
        "modelspec.title": path.stem,
    }


def _network(header: Mapping[str, str]) -> dict[str, str]:
    """The entries on the kind of a plain LoRA: the network's module, and those of its arguments that still hold."""
    module = header.get(MODULE, "")
    entries = {MODULE: module if module.startswith(PLAIN_LORA) else PLAIN_LORA}
    try:
        arguments = json.loads(header.get(ARGUMENTS, "{}"))
        kept = {
            key: each
            for key, each in arguments.items()
            if not OF_OTHER_WEIGHTS.fullmatch(key) and key not in KIND_ARGUMENTS
        }
    except (ValueError, AttributeError, RecursionError):  # another program's
        return entries
    return {**entries, ARGUMENTS: json.dumps(kept, sort_keys=True)} if ARGUMENTS in header else entries


def usual_dtype(weights: AdapterWeights) -> torch.dtype:
    """The type that most of a file's factors are stored in, fp32 for float64; fp16 where it has none."""
    kinds = Counter(update.dtype for update in weights.modules.values()).most_common(1)
    dtype = kinds[0][0] if kinds else torch.float16
    return dtype if dtype in (torch.float16, torch.bfloat16) else torch.float32


def with_comment(header: Mapping[str, str], text: str) -> dict[str, str]:
    """The header with a sentence before the training comment, which people read."""
    earlier = header.get(COMMENT, "")
    return {**header, COMMENT: f"{text}; {earlier}" if earlier and earlier != "None" else text}


def trigger_words(inputs: Sequence[LoraInput]) -> dict[str, str]:
    """The trigger words of all files as one entry."""
    words = [
        word.strip()
        for each in inputs
        for word in each.weights.metadata.get(TRIGGER, "").split(",")
        if word.strip() and word.strip() != "None"
    ]
    return {TRIGGER: ", ".join(dict.fromkeys(words))} if words else {}
