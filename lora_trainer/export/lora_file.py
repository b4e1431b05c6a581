"""LoRA files: written whole and verified, read with every problem named."""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from lora_trainer.core.disk import refusal
from lora_trainer.core.errors import Problem, TrainingFailed, UsageError
from lora_trainer.core.io import atomic_path
from lora_trainer.core.tensorfile import read_tensor_header
from lora_trainer.export import diffusers as diffusers_form
from lora_trainer.export import kohya as kohya_form
from lora_trainer.export.keys import (
    COMPONENT_OF_PREFIX,
    DIFFUSERS_DOWN,
    DIFFUSERS_UP,
    KOHYA_ALPHA,
    KOHYA_DOWN,
    KOHYA_UP,
    ONE_TEXT_ENCODER,
    module_of_kohya,
)
from lora_trainer.export.layout import Names
from lora_trainer.export.metadata import TrainingFacts, header, with_hashes
from lora_trainer.export.weights import LoraPair, LoraWeights, check_keys, folded

SHOWN = 3  # names listed in one message
OTHER_METHODS = {
    ".dora_scale": "DoRA",
    ".lora_magnitude_vector": "DoRA",
    ".lokr_": "LoKr",
    ".hada_": "LoHa",
    ".oft_": "OFT",
}


def write_lora(
    folder: Path,
    name: str,
    weights: LoraWeights,
    facts: TrainingFacts,
    *,
    dtype: torch.dtype = torch.float16,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    names: Names = ONE_TEXT_ENCODER,
) -> tuple[Path, Path]:
    """Write `NAME.safetensors` (kohya) and `NAME.diffusers.safetensors`; return both paths.

    Both hold the same tensors: alpha / rank folded into up, alpha = rank. Each is verified
    before it takes its name. `shapes` are the model's weight shapes by module name, as `shapes_of`
    gives them; `names` are the family's. Raises TrainingFailed, and writes nothing, when a value is not finite or a
    module does not fit `shapes`.
    """
    ready = folded(weights, dtype)
    if shapes is not None and (problems := check_keys(ready, shapes)):
        raise TrainingFailed(problems)
    description = header(facts)
    kohya = kohya_form.kohya_tensors(ready, names)
    diffusers = diffusers_form.diffusers_tensors(ready)
    adapter = {diffusers_form.ADAPTER_METADATA_KEY: diffusers_form.adapter_metadata(ready)}
    kohya_path, diffusers_path = folder / f"{name}.safetensors", folder / f"{name}.diffusers.safetensors"
    write_tensors(kohya_path, kohya, with_hashes(kohya, description))
    write_tensors(diffusers_path, diffusers, {**description, "format": "pt", **adapter})
    return kohya_path, diffusers_path


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file atomically, reading it back before it takes its name.

    Raises OSError when the disk refuses, or what is read back differs from what was written.
    """
    with atomic_path(path) as temporary:
        try:
            save_file(dict(tensors), temporary, metadata=dict(metadata))
        except SafetensorError as error:  # whose message alone says that it is the disk's
            raise OSError(refusal(error) or errno.EIO, str(error), str(path)) from error
        back = load_file(temporary)
        if set(back) != set(tensors) or not all(torch.equal(back[key], tensors[key]) for key in tensors):
            raise OSError(f"{path.name} reads back differently from what was written")


def read_lora(path: Path, families: Sequence[Names] = ()) -> LoraWeights:
    """Read a LoRA in kohya's or diffusers' form, detected from its keys; `families` are those whose names are known.

    NaN is read as it stands (`LoraWeights.not_finite` names it). Raises UsageError, with all
    problems at once, for a missing file, pickle, damage, half a pair, a wrong shape, an
    unknown key, a mixture of forms, or a method other than LoRA.
    """
    tensors, metadata = _open(path)
    _refuse_other_methods(path, tensors)
    _refuse_reaching(path, metadata)
    kohya = [key for key in tensors if key.endswith((KOHYA_DOWN, KOHYA_UP, KOHYA_ALPHA))]
    diffusers = [key for key in tensors if key.endswith((DIFFUSERS_DOWN, DIFFUSERS_UP))]
    if kohya and diffusers:
        counts = f"{len(kohya)} keys in kohya's form and {len(diffusers)} in diffusers'"
        raise _refused(path, f"mixes {counts}.", "Programs load one half silently: export it again in one form.")
    if not kohya and not diffusers:
        fix = "Name a LoRA file; this may be a whole model." if len(tensors) > 0 else "The file holds no tensors."
        raise _refused(path, f"holds no LoRA weights among its {len(tensors)} keys.", fix)
    problems: list[Problem] = []
    unknown = sorted(set(tensors) - set(kohya) - set(diffusers))
    if unknown:
        problems.append(_problem(path, f"holds {len(unknown)} unknown keys ({_some(unknown)}).", "Export it again."))
    if kohya:
        halves, alphas = _kohya_halves(path, {key: tensors[key] for key in kohya}, problems)
    else:
        halves = _diffusers_halves(tensors)
        alphas = {}
    ranks = _check_pairs(path, halves, problems)
    if diffusers:
        alphas = _diffusers_alphas(path, metadata, ranks, problems)
    if problems:
        raise UsageError(problems)
    modules = {
        module: LoraPair(pair["down"], pair["up"], alphas.get(module, float(ranks[module])))
        for module, pair in halves.items()
    }
    return LoraWeights(modules, metadata)


def _open(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    if not path.is_file():
        raise UsageError(Problem(f"There is no LoRA file {path}.", "Check the path."))
    with open(path, "rb") as file:
        start = file.read(9)
    pickled = start[:2] == b"PK" or (start[:1] == b"\x80" and start[8:9] != b"{")
    if pickled or path.suffix.lower() in {".pt", ".ckpt", ".pth", ".bin"}:
        fix = "Pickle can run code when it is read, so it never is: get the file as .safetensors."
        raise _refused(path, "is a pickle file.", fix)
    if path.suffix.lower() != ".safetensors":
        # diffusers would try to read such a file as a pickle, whatever it holds.
        raise _refused(path, "does not end in .safetensors.", "Name a .safetensors file.")
    read_tensor_header(path)  # damage in words, before a library reads it
    try:
        with safe_open(path, framework="pt") as opened:
            metadata = dict(opened.metadata() or {})
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError, ValueError) as error:
        size = path.stat().st_size
        fix = f"It is truncated or no safetensors file ({error}): copy or download it again."
        raise _refused(path, f"cannot be read ({size} bytes).", fix) from None
    return tensors, metadata


def _refuse_other_methods(path: Path, tensors: Mapping[str, Tensor]) -> None:
    for mark, method in OTHER_METHODS.items():
        if any(mark in key for key in tensors):
            raise _refused(path, f"is a {method}, not a plain LoRA.", "Convert it to a LoRA first.")


def _refuse_reaching(path: Path, metadata: Mapping[str, str]) -> None:
    key = diffusers_form.ADAPTER_METADATA_KEY
    try:
        reaching = diffusers_form.reaching_further(metadata)
    except (ValueError, TypeError):
        raise _refused(path, f"has a header entry {key} that cannot be read.", "Export it again.") from None
    if reaching:
        fix = "Programs would read other files, run code or change the base by it: export it again as a plain LoRA."
        raise _refused(path, f"asks in {key} for more than its own weights ({_some(reaching)}).", fix)


def _kohya_halves(
    path: Path, tensors: Mapping[str, Tensor], problems: list[Problem]
) -> tuple[dict[str, dict[str, Tensor]], dict[str, float]]:
    halves: dict[str, dict[str, Tensor]] = {}
    alphas: dict[str, float] = {}
    foreign: list[str] = []
    for key, tensor in tensors.items():
        name, _, part = key.partition(".")
        module = module_of_kohya(name)
        if module is None:
            foreign.append(key)
        elif "." + part == KOHYA_ALPHA:
            alphas[module] = float(tensor.float().reshape(-1)[0]) if tensor.numel() else float("nan")
        elif "." + part in {KOHYA_DOWN, KOHYA_UP}:
            halves.setdefault(module, {})["down" if "." + part == KOHYA_DOWN else "up"] = tensor
    if foreign:
        fix = f"Known beginnings: {', '.join(COMPONENT_OF_PREFIX)}. Was it made for another kind of model?"
        problems.append(_problem(path, f"holds {len(foreign)} keys of unknown parts ({_some(foreign)}).", fix))
    lonely = sorted(set(alphas) - set(halves))
    if lonely:
        problems.append(_problem(path, f"has alpha without weights for {_some(lonely)}.", "Export it again."))
    return halves, alphas


def _diffusers_halves(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    halves: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        for ending, half in ((DIFFUSERS_DOWN, "down"), (DIFFUSERS_UP, "up")):
            if key.endswith(ending):
                halves.setdefault(key.removesuffix(ending), {})[half] = tensor
    return halves


def _check_pairs(path: Path, halves: Mapping[str, Mapping[str, Tensor]], problems: list[Problem]) -> dict[str, int]:
    """Ranks by module; appends what is wrong with the pairs' shapes and types."""
    ranks: dict[str, int] = {}
    single = sorted(module for module, pair in halves.items() if len(pair) < 2)
    if single:
        fix = "Programs fill the other half with random numbers or skip it: export it again."
        problems.append(_problem(path, f"has half a pair for {len(single)} modules ({_some(single)}).", fix))
    for module, pair in halves.items():
        if module in single:
            continue
        down, up = pair["down"], pair["up"]
        fits = down.ndim == up.ndim and down.ndim in {2, 4} and down.shape[0] == up.shape[1] > 0
        if not fits or (up.ndim == 4 and up.shape[2:] != (1, 1)):
            shapes = f"down {list(down.shape)} and up {list(up.shape)}"
            problems.append(
                _problem(path, f"has {shapes} for {module}: [r, in] and [out, r] go together.", "Export it again.")
            )
        elif not (down.is_floating_point() and up.is_floating_point()):
            problems.append(_problem(path, f"holds whole numbers for {module}.", "Export it in fp16, bf16 or fp32."))
        else:
            ranks[module] = down.shape[0]
    return ranks


def _diffusers_alphas(
    path: Path, metadata: Mapping[str, str], ranks: Mapping[str, int], problems: list[Problem]
) -> dict[str, float]:
    try:
        return diffusers_form.alphas(metadata, ranks)
    except (ValueError, TypeError, AttributeError, json.JSONDecodeError):
        key = diffusers_form.ADAPTER_METADATA_KEY
        problems.append(_problem(path, f"has a header entry {key} that cannot be read.", "Export it again."))
        return {}


def _problem(path: Path, message: str, fix: str) -> Problem:
    return Problem(f"{path.name} {message}", fix)


def _refused(path: Path, message: str, fix: str) -> UsageError:
    return UsageError(_problem(path, message, fix))


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
