"""Convert a LoRA file between formats, exactly: the new file is compared with the old one before it gets its name."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.findings import counted
from lora_trainer.lora_format import diffusers as diffusers_form
from lora_trainer.lora_format import kohya as kohya_form
from lora_trainer.lora_format.keys import KOHYA_ALPHA, T5, of_language_model
from lora_trainer.lora_format.kinds.lora import LoraPair, product_norm
from lora_trainer.lora_format.metadata import HASH, with_hashes
from lora_trainer.lora_format.reading import learned_tokens_beside, only_lora, some, values, weights_of
from lora_trainer.lora_format.writing import TensorsAndHeader, learned_token_files, plain_forms, write_together

if TYPE_CHECKING:
    from lora_trainer.lora_format.layer_updates import LayerUpdate
    from lora_trainer.lora_format.layouts import Names
    from lora_trainer.lora_format.weights import AdapterWeights, LoraWeights

Form = Literal["kohya", "diffusers"]
# The largest difference of a module's update, as a share of it, that rounding to each type may make.
ROUNDING = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7, torch.float32: 2.0**-20, torch.float64: 2.0**-40}
DENOISERS = ("unet.", "transformer.")
# A header entry of converted files with their earlier form and alphas, so that converting back gives the same tensors: a power of
# two moves between alpha and a tensor without rounding, but the tensors do not show that it did.
EARLIER = "lora_trainer.earlier"
FLOAT32 = 1e-6  # relative: kohya's form stores alpha as float32
OF_ONE_FORM = (
    "format",
    diffusers_form.ADAPTER_METADATA_KEY,
    kohya_form.FUSED_RANKS,
    "sshs_model_hash",
    "sshs_legacy_hash",
    HASH,
)


@dataclass(frozen=True)
class Converted:
    """The written files. `difference` is the largest of any module's update, as a share of it; 0 is none at all."""

    paths: tuple[Path, ...]
    modules: int
    difference: float
    notes: tuple[str, ...]


@dataclass(frozen=True)
class SourceFile:
    """A LoRA, or another kind of adapter, and the form that its file is in; whether the names of its text encoders are numbered."""

    weights: AdapterWeights
    form: Form
    numbered: bool = False


def convert(
    file: SourceFile,
    target: Path,
    to: Form,
    names: Names,
    families: Sequence[Names],
    *,
    dtype: torch.dtype | None = None,
) -> Converted:
    """Write a LoRA to `target` in the other form, with its header and new hashes; words that were learned go into
    files of their own beside a file in diffusers' form, which has no place for them. A file that comes back to the form
    it had gets the alphas it had.

    Raises UsageError, and writes nothing, for what the form cannot hold exactly, for another kind than LoRA, and where files of
    other learned tokens lie under the target's name.
    """
    source, form = only_lora("The file", file.weights), file.form
    if problems := [*values("The LoRA", source), *_of_others(source, names)]:
        raise UsageError(problems)
    earlier = earlier_of(source.metadata)
    back = earlier if earlier is not None and earlier.form == to != form else None
    weights = _cast(source if back is None else restored(source, back), dtype)
    metadata = {key: value for key, value in source.metadata.items() if key not in OF_ONE_FORM}
    if form != to:
        metadata.pop(EARLIER, None)
        metadata |= remembered(source, form, file.numbered) if back is None else {}
    if to == "kohya":
        tensors, header, notes = _to_kohya(weights, metadata, names, back)
    else:
        tensors, header, notes = _to_diffusers(weights, metadata, back)
    difference = 0.0

    def check(read: Mapping[str, Tensor]) -> None:
        nonlocal difference
        again = only_lora(target.name, weights_of(target.name, read, header, families))
        difference = _difference(source, again, to)

    paths = _write(target, (tensors, header), weights, to, check)
    return Converted(paths, len(source.modules), difference, tuple(notes))


def write_kind(
    weights: AdapterWeights, target: Path, to: Form, names: Names, families: Sequence[Names], *, dtype: torch.dtype
) -> tuple[Path, ...]:
    """Write changes of any kind in `dtype` to `target`, with their header and new hashes, as `convert` writes a LoRA; the files.

    Raises UsageError, and writes nothing, for NaN and infinity, for what the form has no names for, and where files of other
    learned tokens lie under the target's name.
    """
    modules = {name: each.rounded(dtype) for name, each in weights.modules.items()}
    embeddings = {name: tensor.to(dtype).contiguous() for name, tensor in weights.embeddings.items()}
    rounded = replace(weights, modules=modules, embeddings=embeddings)
    if problems := [*values(target.name, rounded), *_of_others(rounded, names)]:
        raise UsageError(problems)
    try:
        kohya, diffusers = plain_forms(rounded, names)
    except ValueError as error:
        raise UsageError(
            Problem("layers_without_names", f"The file has no names for its layers: {error}.", "Is --family right?")
        ) from None
    tensors = (kohya if to == "kohya" else diffusers).tensors
    header = {key: value for key, value in weights.metadata.items() if key not in (*OF_ONE_FORM, EARLIER)}
    header = with_hashes(tensors, header) if to == "kohya" else {**header, "format": "pt"}

    def check(read: Mapping[str, Tensor]) -> None:
        again = weights_of(target.name, read, header, families).modules
        if lost := sorted(again.keys() ^ rounded.modules.keys()):
            raise OSError(f"what was written reads back with other layers: {some(lost)}")

    return _write(target, (tensors, header), rounded, to, check)


def _write(
    target: Path,
    content: TensorsAndHeader,
    weights: AdapterWeights,
    to: Form,
    check: Callable[[Mapping[str, Tensor]], None],
) -> tuple[Path, ...]:
    """Write a file and those of its learned tokens together, where the form has them beside it; `check` is of the tensors read back."""
    token_files: dict[Path, TensorsAndHeader] = {}
    if to == "diffusers" and weights.embeddings:
        kept = next(iter(weights.embeddings.values())).dtype
        token_files = learned_token_files(target.parent, target.stem, weights, kept)
    others = [path for path in learned_tokens_beside(target) if path not in token_files]
    if token_files:  # which hide those of the name without `.diffusers`
        others = [path for path in others if path.name.startswith(f"{target.stem}.embedding-")]
    elif weights.embeddings:  # the file itself holds them, and no others are looked for
        others = []
    if others:
        message = f"{some([path.name for path in others])} would be read as learned tokens of {target.name}."
        raise UsageError(
            Problem("taken_for_tokens", message, "Remove what an earlier file of this name left, or name another file.")
        )
    write_together({target: content, **token_files}, lambda path, read: check(read) if path == target else None)
    return (target, *token_files)


def _of_others(weights: AdapterWeights, names: Names) -> list[Problem]:
    """A denoiser of another kind than the family has."""
    others = [
        name for name in weights.modules if name.startswith(DENOISERS) and not name.startswith(f"{names.denoiser}.")
    ]
    if not others:
        return []
    message = f"{counted(len(others), 'module')} of the LoRA belong to no part of {names.family} ({some(others)})."
    return [Problem("layers_of_no_part", message, "Name the family that it was trained on with --family.")]


def _cast(weights: LoraWeights, dtype: torch.dtype | None) -> LoraWeights:
    if dtype is None:
        return weights
    modules = {
        name: LoraPair(pair.down.to(dtype), pair.up.to(dtype), pair.alpha) for name, pair in weights.modules.items()
    }
    cast = replace(weights, modules=modules)
    if bad := cast.not_finite():
        message = f"{len(bad)} modules are too large for {str(dtype).removeprefix('torch.')} (first: {bad[0]})."
        raise UsageError(Problem("weights_too_large", message, "Remove --dtype, or use bf16 or fp32."))
    return cast


def _to_kohya(
    weights: LoraWeights, metadata: Mapping[str, str], names: Names, back: Earlier | None
) -> tuple[dict[str, Tensor], dict[str, str], list[str]]:
    try:
        tensors, ranks = kohya_form.kohya_tensors(weights, names, as_they_are=back is not None)
    except ValueError as error:
        raise UsageError(
            Problem(
                "form_cannot_hold",
                f"kohya's form cannot hold this LoRA: {error}.",
                "Use --to diffusers, which has a name for every layer; if it is of another family, name that with --family.",
            )
        ) from None
    notes = []
    alphas = {
        (prefix, float(tensor))
        for key, tensor in tensors.items()
        for prefix in names.prefixes.values()
        if key.endswith(KOHYA_ALPHA) and key.startswith(f"{prefix}_")
    }
    if not names.layout and len(alphas) > len({prefix for prefix, _ in alphas}):
        notes.append(
            "alpha differs between modules, and no power of two makes it one: diffusers takes the commonest for all "
            "of this form's modules, so that its strength differs. Use the file in diffusers' form there."
        )
    header = {**metadata, **ranks}
    if not {"ss_base_model_version", "ss_v2"} & set(metadata):
        # A1111 takes any header that does not name its base model for one of SD1.
        header.pop(EARLIER, None)
        return tensors, header, notes
    return tensors, with_hashes(tensors, header), notes


def _to_diffusers(
    weights: LoraWeights, metadata: Mapping[str, str], back: Earlier | None
) -> tuple[dict[str, Tensor], dict[str, str], list[str]]:
    """A power of two is folded into up; any other scale stays in the header, without rounding."""
    modules = {name: pair if back else _folded_exactly(pair) for name, pair in weights.modules.items()}
    ready = replace(weights, modules=modules)
    kept = [name for name, pair in modules.items() if pair.scale != 1.0]
    notes = []
    if t5 := [name for name in modules if T5 in name]:
        notes.append(
            f"{counted(len(t5), 'layer')} of T5: diffusers' load_lora_weights skips them without a message "
            "(docs/text.md says how to load them there). ComfyUI and sd-scripts read kohya's form whole."
        )
    if language := [name for name in modules if of_language_model(name)]:
        notes.append(
            f"{counted(len(language), 'layer')} of a language model: diffusers' load_lora_weights skips them without a message. "
            "ComfyUI reads kohya's form whole."
        )
    if kept:
        notes.append(
            f"{counted(len(kept), 'layer')} with alpha in the header, "
            f"{'where the file had it before' if back else 'since multiplied with it the weights would be rounded'}: diffusers reads it; "
            "ComfyUI does not and would use scale 1 for this file. Use the file in kohya's form there."
        )
    adapter = {diffusers_form.ADAPTER_METADATA_KEY: diffusers_form.adapter_metadata(ready)}
    return diffusers_form.diffusers_tensors(ready), {**metadata, "format": "pt", **adapter}, notes


def _folded_exactly(pair: LoraPair) -> LoraPair:
    """With alpha = rank, where that rounds nothing."""
    rank, scale = float(pair.rank), pair.scale
    folded = pair.with_alpha(rank)
    if folded.alpha != rank and scale > 0.0 and math.frexp(scale)[0] == 0.5:
        # Where up would leave the range of its type, down may not.
        down = pair.down * scale
        if torch.equal(down / scale, pair.down):
            return LoraPair(down, pair.up, rank)
    return folded


def _difference(source: LoraWeights, again: LoraWeights, to: Form) -> float:
    """The largest difference of any module's update, as a share of it. Raises OSError beyond rounding errors."""
    ours, theirs = (
        {name for name, pair in each.modules.items() if bool(pair.up.any()) and bool(pair.down.any())}
        for each in (source, again)
    )
    # A part of a fused layer that had no pair comes back with one of zeros where the others share their down.
    if (lost := ours - set(again.modules)) or (more := theirs - set(source.modules)):
        raise OSError(f"what was written reads back with other modules: {some(sorted(lost or more))}")
    worst = 0.0
    for name, pair in again.modules.items():
        if name not in source.modules:
            continue
        share = relative_difference(source.modules[name], pair)
        if share > ROUNDING.get(pair.up.dtype, 2.0**-3):
            raise OSError(f"what was written of {name} differs by {share:.1e} of its size")
        worst = max(worst, share)
    return worst


def relative_difference(one: LoraPair, other: LoraPair) -> float:
    """The norm of the difference of two pairs' updates over the first one's, in float64, without forming either."""
    first, second = (pair.up.double().flatten(1) * pair.scale for pair in (one, other))
    if torch.equal(one.down, other.down) and torch.equal(first, second):
        return 0.0
    ups = torch.cat([first, -second], dim=1)
    downs = torch.cat([one.down.double().flatten(1), other.down.double().flatten(1)])
    size = size_of_update(one)
    gap = product_norm(ups, downs)
    return gap / size if size else gap


def size_of_update(update: LayerUpdate) -> float:
    """The Frobenius norm of a change; NaN where it is not finite."""
    return update.norm if update.finite else math.nan


@dataclass(frozen=True)
class Earlier:
    """`alpha` counts for modules that `alphas` does not name. `numbered`: the text encoders' names had numbers."""

    form: str
    alpha: float
    alphas: Mapping[str, float]
    numbered: bool

    @property
    def entry(self) -> dict[str, str]:
        document = {"form": self.form, "alpha": self.alpha, "alphas": dict(self.alphas), "numbered": self.numbered}
        return {EARLIER: json.dumps(document, sort_keys=True)}


def earlier_of(metadata: Mapping[str, str]) -> Earlier | None:
    """The entry of a header; None where there is none that can be read."""
    try:
        document = json.loads(metadata.get(EARLIER) or "null")
        alphas = {str(name): float(alpha) for name, alpha in document["alphas"].items()}
        found = Earlier(str(document["form"]), float(document["alpha"]), alphas, document["numbered"] is True)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return found if all(0 < alpha < math.inf for alpha in (found.alpha, *alphas.values())) else None


def remembered(weights: LoraWeights, form: str, numbered: bool) -> dict[str, str]:
    """The header's entry on weights that are about to leave `form`; none where alpha is each module's rank."""
    pairs = weights.modules
    alphas = Counter(pair.alpha for pair in pairs.values())
    plain = len(alphas) == 1 and all(pair.alpha == pair.rank for pair in pairs.values())
    if (plain and not numbered) or not pairs or any(not 0 < alpha < math.inf for alpha in alphas):
        return {}
    usual = alphas.most_common(1)[0][0]
    others = {name: pair.alpha for name, pair in pairs.items() if pair.alpha != usual}
    return Earlier(form, usual, others, numbered).entry


def restored(weights: LoraWeights, earlier: Earlier) -> LoraWeights:
    """The same changes with the alphas that they had before, where that moves no more than a power of two."""
    modules = {
        name: pair.with_alpha(earlier.alphas.get(name, earlier.alpha), FLOAT32)
        for name, pair in weights.modules.items()
    }
    return replace(weights, modules=modules)
