"""Read a LoRA file of any program as weights by diffusers' names, or refuse it with every problem named.

Exact where the file holds one of the `kinds`; every other method is named.
"""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lora_trainer.core.bounded import TextError, read_json_object
from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.findings import counted
from lora_trainer.core.tensorfile import is_pickle, read_tensor_header
from lora_trainer.lora_format import diffusers as diffusers_form
from lora_trainer.lora_format.fused import divide
from lora_trainer.lora_format.keys import (
    COMPONENT_OF_PREFIX,
    EMBEDDING,
    HINTS,
    PEFT,
    Found,
    Key,
    read_key,
    resolve,
)
from lora_trainer.lora_format.kinds import BESIDE, KINDS
from lora_trainer.lora_format.kinds.lora import LoraPair
from lora_trainer.lora_format.kohya import fused_ranks
from lora_trainer.lora_format.layer_updates import FactorUpdate, LayerUpdate, titles, to_lora
from lora_trainer.lora_format.weights import AdapterWeights, LoraWeights, plain_pairs

if TYPE_CHECKING:
    from lora_trainer.lora_format.layouts import Names

ONE_ENCODER_SLOT = "string_to_param.*"  # a token's name inside a file, of one text encoder
MOST_CONFIG_BYTES = 1 << 20
PEFT_CONFIG = "adapter_config.json"  # peft's config beside its file, the only place of alpha
SHOWN = 3  # names listed in one message
CHANGES_OF_NORMS = "LoRA with changes of norms"
# Methods that are not read: by a part of a key, and by its end.
OTHER_FORMS = {part: what for kind in KINDS.values() for part, what in kind.unread.items()} | {".boft_": "BOFT"}
OTHER_METHODS = {
    ".a1.weight": "GLoRA",
    ".b1.weight": "GLoRA",
    ".on_input": "IA3",
    ".vera_lambda": "VeRA",
    ".w_norm": CHANGES_OF_NORMS,
    ".b_norm": CHANGES_OF_NORMS,
    ".diff_b": "LoRA with changes of biases",
    ".set_weight": "LoRA with whole weights",
    ".lora_B.bias": "LoRA with changes of biases",
    ".lora_up.bias": "LoRA with changes of biases",
    ".lora_A.bias": "LoRA with changes of biases",
    ".lora_down.bias": "LoRA with changes of biases",
    ".reshape_weight": "LoRA that widens layers",
}
OTHER_FILES = (  # by a beginning of any key, the surest first
    ("control_model.", "a ControlNet"),
    ("lora_controlnet", "a Control-LoRA"),
    ("image_proj.", "an IP-Adapter"),
    ("controlnet_", "a ControlNet"),
    ("model.diffusion_model.", "a base model"),
    ("first_stage_model.", "a VAE (VAE)"),
    ("cond_stage_model.", "a text encoder"),
    ("bundle_emb.", "a set of learned tokens"),
    ("emb_params", "a learned token (textual inversion)"),
    ("clip_g", "a learned token (textual inversion)"),
    ("clip_l", "a learned token (textual inversion)"),
    ("string_to_param", "a learned token (textual inversion)"),
    ("decoder.up", "a VAE (VAE)"),
    ("quant_conv.", "a VAE (VAE)"),
    ("encoder.block.", "a text encoder (T5)"),
    ("text_model.", "a text encoder (CLIP)"),
    ("down_blocks.", "a base model's U-Net"),
    ("input_blocks.", "a base model's U-Net"),
    ("joint_blocks.", "a base model's transformer"),
    ("double_blocks.", "a base model's transformer"),
    ("transformer_blocks.", "a base model's transformer"),
)
# Layers that other programs train beside the denoiser, by a part of their names, and what they are.
NOT_SUPPORTED = {
    re.compile(r"(?:^|[._])llm_adapter[._]"): "a text conditioner (llm_adapter)",
    re.compile(r"^text_conditioner\."): "a text conditioner (text_conditioner)",
}
WIDE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
NARROW = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)  # read as float32
FORMS = {
    "kohya": "kohya's form",
    "diffusers": "diffusers'",
    "lycoris": "LyCORIS'",
    "old": "the form that diffusers had before peft",
}


def method_of(tensors: Mapping[str, Tensor]) -> str | None:
    """The method of a file's tensors that is not read; None when all may be."""
    if any(key.endswith(".diff") and tensor.ndim < 2 for key, tensor in tensors.items()):
        return CHANGES_OF_NORMS
    inside = (method for part, method in OTHER_FORMS.items() if any(part in key for key in tensors))
    at_the_end = (method for end, method in OTHER_METHODS.items() if any(key.endswith(end) for key in tensors))
    return next(chain(inside, at_the_end), None)


@dataclass(frozen=True)
class Collected:
    """The readable part of a file, and all its problems. `names` are the file's, with the meaning of each."""

    weights: AdapterWeights
    form: str  # a key of FORMS, or "" where it is unknown
    names: Mapping[str, Found]
    problems: tuple[Problem, ...]


def weights_of(
    file: str,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    families: Sequence[Names] = (),
    peft_config: Mapping[str, Any] | None = None,
) -> AdapterWeights:
    """The weights of a file's tensors; `file` is its name in messages, `peft_config` the config beside it.

    Raises UsageError with all problems at once for a method that is not read, a mixture of forms, half a pair, wrong
    shapes, and unknown keys.
    """
    collected = collect(file, tensors, metadata, families, peft_config)
    if collected.problems:
        raise UsageError([*collected.problems, *values(file, collected.weights)])
    return collected.weights


def only_lora(file: str, weights: AdapterWeights) -> LoraWeights:
    """The weights of a plain LoRA. Raises UsageError for other kinds."""
    if (pairs := plain_pairs(weights)) is None:
        updates = list(weights.modules.values())
        fix = f"Write it as a LoRA first: {to_lora(updates)}."
        raise UsageError(Problem("not_a_plain_lora", f"{file} is {titles(updates)}, not a plain LoRA.", fix))
    return pairs


def values(file: str, weights: AdapterWeights) -> list[Problem]:
    """Problems of the numbers of a file whose names and shapes are right: NaN, infinity."""
    if not (bad := weights.not_finite()):
        return []
    message = f"{file} holds NaN or infinity in {counted(len(bad), 'module')} ({some(bad)})."
    return [Problem("lora_not_finite", message, "Train it again with a lower learning rate.")]


@dataclass(frozen=True)
class _Report:
    """The problems of one file; exporting it again solves most."""

    file: str
    problems: list[Problem] = field(default_factory=list)

    def add(self, code: str, message: str, fix: str = "Export it again.") -> None:
        self.problems.append(Problem(code, f"{self.file} {message}", fix))

    def add_layer(self, message: str, fix: str) -> None:
        self.problems.append(Problem("lora_layer_invalid", f"{self.file}: {message}", fix))


def collect(
    file: str,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    families: Sequence[Names] = (),
    peft_config: Mapping[str, Any] | None = None,
) -> Collected:
    """As `weights_of`, but of the readable tensors, with the problems of the others."""
    embeddings = {
        key.removeprefix(EMBEDDING): _wide(tensor) for key, tensor in tensors.items() if key.startswith(EMBEDDING)
    }
    keys = {key: read for key in tensors if not key.startswith(EMBEDDING) and (read := read_key(key))}
    forms = sorted({read.form for read in keys.values()} - {""})
    if forms == ["kohya", "lycoris"]:
        forms = ["kohya"]  # LyCORIS chooses a kind for each layer
    if whole := _wrong_kind(file, tensors, keys, forms):
        return Collected(LoraWeights({}, metadata, embeddings), forms[0] if len(forms) == 1 else "", {}, (whole,))
    report = _Report(file)
    if unknown := sorted(key for key in tensors if key not in keys and not key.startswith(EMBEDDING)):
        report.add("lora_keys_unknown", f"holds {counted(len(unknown), 'unknown key')} ({some(unknown)}).")
    if flat := sorted(word for word, tensor in embeddings.items() if tensor.ndim != 2 or 0 in tensor.shape):
        report.add("tokens_invalid", f"holds learned tokens that are no table of [tokens, width] ({some(flat)}).")

    # Whose names they are: by the names, by the header, and by the shapes of the layers.
    halves = _halves(keys, tensors)
    updates = _updates(report, halves)
    shapes = {name: update.weight_shape for name, update in updates.items() if update is not None}
    sides = _sides(halves) | {name: (shape[0], shape[1]) for name, shape in shapes.items() if len(shape) == 2}
    hint = " ".join(metadata.get(key, "") for key in HINTS).lower()
    found, family = resolve(halves, families, hint, sides)
    foreign = sorted(set(halves) - set(found))
    for pattern, what in NOT_SUPPORTED.items():
        if layers := [name for name in foreign if pattern.search(name)]:
            listed = f"{counted(len(layers), 'layer')} of {what}, which are not supported ({some(layers)})"
            report.add(
                "lora_layers_unsupported", f"has {listed}.", "Use a LoRA that was trained on the transformer alone."
            )
            foreign = [name for name in foreign if name not in layers]
    if foreign:
        fix = f"Known beginnings: {', '.join(COMPONENT_OF_PREFIX)}. Was it made for another kind of model?"
        report.add(
            "lora_keys_unknown", f"holds {counted(len(foreign), 'name')} of unknown parts ({some(foreign)}).", fix
        )

    # The change of each layer: pairs, then other kinds, then what lies beside either.
    plain = {name: parts for name, parts in halves.items() if name in found and name not in updates}
    pairs = _pairs(report, plain)
    alphas = {} if "kohya" in forms else _header_alphas(report, metadata, peft_config, found, pairs)
    alphas |= {name: float(plain[name]["alpha"].float().flatten()[0]) for name in pairs if "alpha" in plain[name]}
    changes: dict[str, LayerUpdate] = {
        name: replace(pair, alpha=alphas.get(name, pair.alpha)) for name, pair in pairs.items()
    }
    changes |= {name: each for name, each in updates.items() if name in found and each is not None}
    changes = _with_what_lies_beside(report, changes, halves, metadata)
    modules = _modules(report, changes, found, fused_ranks(metadata))
    weights = AdapterWeights(modules, metadata, embeddings, family.family if family else None)
    return Collected(weights, forms[0] if forms else "", found, tuple(report.problems))


OF_LORA_DIFFUSION = re.compile(r"(?:unet|text_encoder):\d+:(?:up|down)")
ON_DISTINCT_LAYERS = ["diffusers", "old"]  # forms that programs read side by side
RUN_STATE = re.compile(r"best-\d+\.safetensors|(adapter|average|optimizer)\.safetensors")  # in a run's checkpoints


def _wrong_kind(
    file: str, tensors: Mapping[str, Tensor], keys: Mapping[str, Key], forms: Sequence[str]
) -> Problem | None:
    if method := method_of(tensors):
        return Problem(
            "not_a_plain_lora", f"{file} is {method}, not a plain LoRA.", "Use it in the program that it was made for."
        )
    if len(forms) > 1 and forms != ON_DISTINCT_LAYERS:
        counts = [f"{sum(read.form == form for read in keys.values())} keys in {FORMS[form]}" for form in forms]
        fix = "Programs load one half silently: export it again in one form."
        return Problem("lora_kinds_mixed", f"{file} mixes {' and '.join(counts)}.", fix)
    if any(OF_LORA_DIFFUSION.fullmatch(key) for key in tensors):
        message = f"{file} is a LoRA of cloneofsimo's lora_diffusion, whose layers have numbers in place of names."
        return Problem(
            "lora_without_names", message, "No other program reads it: use a LoRA of kohya's or diffusers' format."
        )
    if not forms and not any(read.part == "alpha" for read in keys.values()):
        kind = other_file(list(tensors))
        fix = "Name a LoRA file; a base model is named with --model." if tensors else "The file holds no tensors."
        if RUN_STATE.fullmatch(file):
            kind, fix = "a state of a training run", "Name a LoRA file in the run's folder."
        return Problem(
            "no_lora_weights",
            f"{file} holds no LoRA weights among its {len(tensors)} keys{f': it is {kind}' if kind else ''}.",
            fix,
        )
    return None


def other_file(keys: Sequence[str]) -> str | None:
    """What a file without LoRA weights is, by its keys; None when that is not known."""
    return next((kind for beginning, kind in OTHER_FILES if any(key.startswith(beginning) for key in keys)), None)


def some(names: Sequence[str]) -> str:
    """The first names of many, for a sentence."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _halves(keys: Mapping[str, Key], tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    halves: dict[str, dict[str, Tensor]] = {}
    for key, read in keys.items():
        name = read.name.removesuffix("_lora") if read.part == "alpha" else read.name
        halves.setdefault(name, {})[read.part] = tensors[key]
    return halves


def _sides(halves: Mapping[str, Mapping[str, Tensor]]) -> dict[str, tuple[int, int]]:
    """Rows and columns of the linear layers."""
    return {
        name: (parts["up"].shape[0], parts["down"].shape[1])
        for name, parts in halves.items()
        if {"up", "down"} <= set(parts) and parts["up"].ndim == parts["down"].ndim == 2 and parts["down"].shape[1]
    }


def _updates(report: _Report, halves: Mapping[str, Mapping[str, Tensor]]) -> dict[str, FactorUpdate | None]:
    """The changes that are no low-rank products; None for one that cannot be read, which is reported."""
    updates: dict[str, FactorUpdate | None] = {}
    for name, parts in halves.items():
        tensors = {part: _wide(tensor) for part, tensor in parts.items() if part not in ("alpha", *BESIDE)}
        if set(tensors) <= {"down", "up", "mid"}:
            continue
        alpha = None if "alpha" not in parts else float(parts["alpha"].float().reshape(-1)[0])
        try:
            updates[name] = _update_of(name, tensors, alpha)
        except ValueError as error:
            updates[name] = None
            report.add_layer(f"{name}: {error}.", "Export it again, with one kind for each layer.")
    return updates


def _update_of(name: str, tensors: Mapping[str, Tensor], alpha: float | None) -> FactorUpdate:
    """The change of one layer's tensors. Raises ValueError for an incomplete or mixed set, and wrong shapes."""
    kinds = [kind for kind in KINDS.values() if kind.ends and any(end.startswith(kind.parts) for end in tensors)]
    kind = kinds[0].update
    if len(kinds) > 1 or not issubclass(kind, FactorUpdate):
        raise ValueError(f"{', '.join(sorted(tensors))} are of several kinds")
    kind.check_alpha(name, alpha)
    if any(0 in each.shape for each in tensors.values()):
        raise ValueError("it is empty")
    if unpaired := kind.complete(set(tensors)) ^ set(tensors):
        raise ValueError(f"{kinds[0].title} does not fit together ({', '.join(sorted(unpaired))})")
    update = kind(tensors, alpha)
    try:
        shapes_fit = update.rank > 0 and min(update.weight_shape) > 0
        # Computed without values: torch compares the shapes.
        with torch.device("meta"):
            shapes = {end: torch.empty(each.shape) for end, each in tensors.items()}
        replace(update, tensors=shapes, alpha=None).delta(torch.empty(update.weight_shape[0], 1, device="meta"))
    except (RuntimeError, IndexError, TypeError, ValueError):
        shapes_fit = False
    if not shapes_fit:
        shapes_shown = ", ".join(f"{end} {list(each.shape)}" for end, each in sorted(tensors.items()))
        raise ValueError(f"its shapes do not fit ({shapes_shown})")
    return update


def _with_what_lies_beside(
    report: _Report,
    changes: Mapping[str, LayerUpdate],
    halves: Mapping[str, Mapping[str, Tensor]],
    metadata: Mapping[str, str],
) -> dict[str, LayerUpdate]:
    """The changes, of which kinds with tensors beside those of others make their own."""
    found = dict(changes)
    for name, change in changes.items():
        parts = {part: _wide(tensor) for part, tensor in halves[name].items() if part in BESIDE}
        for kind in KINDS.values():
            if kind.decompose is None or parts.keys().isdisjoint(kind.parts):
                continue
            try:
                found[name] = kind.decompose(change, parts, metadata)
            except ValueError as error:
                report.add("lora_layer_invalid", f"has {error} for {name}, of {change.weight_shape[0]} rows.")
    return found


def _pairs(report: _Report, halves: Mapping[str, Mapping[str, Tensor]]) -> dict[str, LoraPair]:
    """Pairs with alpha = rank; reports what is wrong with shapes and types."""
    pairs: dict[str, LoraPair] = {}
    if lonely := sorted(name for name, parts in halves.items() if set(parts) <= {"alpha", *BESIDE}):
        report.add("lora_incomplete", f"has alpha without weights for {some(lonely)}.")
    if single := sorted(name for name, parts in halves.items() if len({"down", "up"} & set(parts)) == 1):
        fix = "Programs fill the other half with random numbers or skip it: export it again."
        report.add("lora_incomplete", f"has half a pair for {counted(len(single), 'module')} ({some(single)}).", fix)
    for name, parts in halves.items():
        if name in single or name in lonely or "down" not in parts:
            continue
        down, up, mid = _wide(parts["down"]), _wide(parts["up"]), parts.get("mid")
        fits = down.ndim == up.ndim and down.ndim in {2, 4} and down.shape[0] == up.shape[1] > 0
        if mid is not None and fits:
            # The k x k kernel between two of 1 x 1 belongs to down: the same update, in fp32.
            fits = mid.ndim == 4 and down.ndim == 4 and mid.shape[0] == up.shape[1] and mid.shape[1] == down.shape[0]
            if fits:
                down = torch.einsum("rskl,si->rikl", mid.float(), down.float().flatten(1))
        if not fits or (up.ndim == 4 and up.shape[2:] != (1, 1)):
            shapes = f"down {list(down.shape)} and up {list(up.shape)}"
            report.add("lora_layer_invalid", f"has {shapes} for {name}: [r, in] and [out, r] go together.")
        elif unread := [tensor.dtype for tensor in (down, up) if tensor.dtype not in WIDE]:
            message = f"holds {str(unread[0]).removeprefix('torch.')} for {name}."
            report.add("lora_type_unsupported", message, "Export it in fp16, bf16 or fp32.")
        elif "alpha" in parts and parts["alpha"].numel() != 1:
            shape = list(parts["alpha"].shape)
            report.add("lora_layer_invalid", f"has an alpha of shape {shape} for {name}, in place of one number.")
        else:
            pairs[name] = LoraPair(down, up, float(down.shape[0]))
    return pairs


def _wide(tensor: Tensor) -> Tensor:
    """A tensor that can be computed with: float32 holds every value of eight bits."""
    return tensor.float() if tensor.dtype in NARROW else tensor


def _header_alphas(
    report: _Report,
    metadata: Mapping[str, str],
    peft_config: Mapping[str, Any] | None,
    found: Mapping[str, Found],
    pairs: Mapping[str, LoraPair],
) -> dict[str, float]:
    """The alpha of each name as diffusers, or peft, would read it."""
    module = {name: found[name].modules[0] for name in pairs}
    try:
        alphas = diffusers_form.alphas(metadata, {module[name]: pair.rank for name, pair in pairs.items()}, peft_config)
        return {name: alphas[module[name]] for name in pairs}
    except (ValueError, TypeError, AttributeError, json.JSONDecodeError):
        report.add("header_invalid", f"has a header entry {diffusers_form.ADAPTER_METADATA_KEY} that cannot be read.")
        return {}


def _modules(
    report: _Report,
    pairs: Mapping[str, LayerUpdate],
    found: Mapping[str, Found],
    ranks: Mapping[str, Sequence[int]],
) -> dict[str, LayerUpdate]:
    """The changes by the names of diffusers, those of fused layers divided among their parts."""
    modules: dict[str, LayerUpdate] = {}
    twice = []
    for name, pair in pairs.items():
        place = found[name]
        try:
            parts = divide(pair, place.rules, ranks.get(name)) if place.rules else {0: pair}
        except ValueError as error:
            report.add_layer(f"{name} does not fit its layer: {error}.", "Is it for another model?")
            continue
        for part, each in parts.items():
            if place.modules[part] in modules:
                twice.append(place.modules[part])
            modules[place.modules[part]] = each
    if twice:
        message = f"names {counted(len(twice), 'module')} twice, by two names ({some(sorted(twice))})."
        report.add("lora_module_twice", message, "Programs take one of them: export it again.")
    return modules


def read_adapter(path: Path, families: Sequence[Names] = ()) -> AdapterWeights:
    """Read an adapter file of any readable kind and program, its format detected from its keys; `families` are those whose
    names are known.

    NaN is kept (`AdapterWeights.not_finite` names it). Raises UsageError, with all
    problems at once, for a missing file, pickle, damage, half a pair, a wrong shape, an
    unknown key, a mixture of forms, or another method.
    """
    tensors, metadata = open_tensors(path)
    refuse_reaching(path, metadata, tensors)
    return weights_of(path.name, tensors, metadata, families, beside(path, tensors))


def read_lora(path: Path, families: Sequence[Names] = ()) -> LoraWeights:
    """The same of a plain LoRA. Raises UsageError for other kinds too."""
    return only_lora(path.name, read_adapter(path, families))


def beside(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any] | None:
    """peft's own config beside a file in its form; None for other files. Raises UsageError."""
    config = path.with_name(PEFT_CONFIG)
    if not any(key.startswith(PEFT) for key in tensors) or not config.is_file():
        return None
    try:
        document = read_json_object(config, MOST_CONFIG_BYTES)
    except (TextError, OSError) as error:
        raise UsageError(
            Problem("config_unreadable", f"{config} cannot be read: {error}.", "Copy it again, or remove it.")
        ) from None
    if reaching := diffusers_form.reaching_further(document, layers_of(tensors)):
        raise _refused(config, f"asks for more than the file's own weights ({some(reaching)}).", "Export a plain LoRA.")
    return document


def open_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    if path.is_dir():
        inside = ", ".join(sorted(file.name for file in path.glob("*.safetensors"))) or "none"
        raise UsageError(
            Problem("path_is_folder", f"{path} is a folder, not a LoRA file.", f"LoRA files in it: {inside}.")
        )
    if not path.exists():
        raise UsageError(Problem("file_missing", f"There is no LoRA file {path}.", "Check the path."))
    if not path.is_file():  # opening a pipe would wait forever
        raise _refused(path, "is not a regular file.", "Name a .safetensors file.")
    with open(path, "rb") as file:
        pickled = is_pickle(file.read(8))
    if pickled or path.suffix.lower() in {".pt", ".ckpt", ".pth", ".bin"}:
        fix = "Pickle can run code when it is read, so it never is: get the file as .safetensors."
        raise _refused(path, "is a pickle file.", fix)
    if path.suffix.lower() != ".safetensors":
        # diffusers would try to read such a file as a pickle, whatever it holds.
        raise _refused(path, "does not end in .safetensors.", "Name a .safetensors file.")
    read_tensor_header(path)  # raises a clear error for damage, before a library reads it
    try:
        with safe_open(path, framework="pt") as opened:
            metadata = dict(opened.metadata() or {})
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError, ValueError) as error:
        size = path.stat().st_size
        fix = f"It is truncated or no safetensors file ({error}): copy or download it again."
        raise _refused(path, f"cannot be read ({size} bytes).", fix) from None
    return tensors, metadata


def layers_of(keys: Iterable[str]) -> list[str]:
    """The names of the layers that keys are of."""
    return list({read.name for key in keys if (read := read_key(key)) is not None})


def refuse_reaching(path: Path, metadata: Mapping[str, str], keys: Iterable[str]) -> None:
    key = diffusers_form.ADAPTER_METADATA_KEY
    try:
        reaching = diffusers_form.reaching_further(diffusers_form.config_in(metadata), layers_of(keys))
    except (ValueError, TypeError):
        raise _refused(path, f"has a header entry {key} that cannot be read.", "Export it again.") from None
    if reaching:
        fix = (
            "Programs would read other files, run code, search without end or change the base model by it: "
            "export it again as a plain LoRA."
        )
        raise _refused(path, f"asks in {key} for more than its own weights ({some(reaching)}).", fix)


def _refused(path: Path, message: str, fix: str) -> UsageError:
    return UsageError(Problem("file_unreadable", f"{path.name} {message}", fix))


def learned_tokens_beside(path: Path) -> list[Path]:
    """The files that are read as a LoRA's learned tokens: those of its name, else those of its name without `.diffusers`."""
    for stem in (path.stem, path.stem.removesuffix(".diffusers")):
        if found := sorted(path.parent.glob(f"{glob.escape(stem)}.embedding-*.safetensors")):
            return found
    return []


def read_learned_tokens(path: Path) -> dict[str, Tensor]:
    """The learned tokens beside a LoRA in diffusers' form, as written by `write_learned_tokens`. Raises UsageError."""
    found: dict[str, Tensor] = {}
    for file in learned_tokens_beside(path):
        tensors, metadata = open_tensors(file)
        token = metadata.get("name", file.stem.partition(".embedding-")[2])
        for slot, tensor in tensors.items():
            found[f"{token}.{ONE_ENCODER_SLOT if slot == 'emb_params' else slot}"] = tensor
    return found
