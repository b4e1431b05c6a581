"""Lay out a single-file checkpoint, or a folder with replaced parts, as a small folder of diffusers. No torch."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.families import families
from lora_trainer.core.gguf_file import read_weights_header
from lora_trainer.core.io import write_json
from lora_trainer.models.detection import detect_family
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.folder import (
    check_part,
    places_of_weights,
    read_config,
    read_index,
    tokenizer_folder,
    tokenizer_of,
    weights_are_here,
)
from lora_trainer.models.places import Place, laid_out_models, prune_laid_out, write_places
from lora_trainer.models.qwen_edit import READER, SETTINGS
from lora_trainer.models.single.fitting import check_vae
from lora_trainer.models.single.recognize import recognize
from lora_trainer.models.single.stored import Part, SingleFile, Stored, refuse_not_read
from lora_trainer.models.single.texts import text_encoders_of, text_part, tokenizers_alone
from lora_trainer.models.single.tokenizers import copy_small, copy_tokenizer, origins
from lora_trainer.models.single.vae import vae_part
from lora_trainer.models.single.video_vae import is_video_vae, video_vae_part

if TYPE_CHECKING:
    from lora_trainer.models.family import CheckpointSpec

VERSION = 5  # of the layout; raise it when the same file becomes another folder
SHOWN_OF_NAME = 40
VAE_PREFIXES = ("first_stage_model.", "vae.")
VAE_OF_2_1 = 768  # pixels, of models that predict velocity
# Beginnings of parts that are used.
NEEDED = (
    *("unet", "transformer", "vae", "scheduler", "text_encoder", "tokenizer", "text_conditioner", "t5_tokenizer"),
    READER,
)
WITHIN = ("tokenizer", READER)  # which part may lie in which
Parts = Mapping[str, Path | None]


def lay_out(base: Path | SingleFile, parts: Parts | None = None, *, kept: bool = True) -> Path:
    """A folder in diffusers' layout for a checkpoint, or for a folder with replaced parts. No weight is copied.

    `parts` names by component a replacement for the base model's own part, or one that it lacks: a component's folder
    (`text_encoder_2`, `tokenizer_2`, `vae`) or one file of its weights; None removes a text encoder. The folder is in
    the user's cache and is written once for each state of the files. Raises UsageError for a file that is damaged or no
    base model, and for missing parts. One that is not `kept` belongs to this process, whose caller removes it.
    """
    replacement = dict(parts or {})
    if isinstance(base, Path) and base.is_file():
        base = recognize(base)
    place, variant = (base.file, f"{base.variant} {base.prediction}") if isinstance(base, SingleFile) else (base, "")
    name = f"{place.stem[:SHOWN_OF_NAME]}-{_key(place, variant, replacement)[:16]}"
    target = laid_out_models() / (name if kept else f"{name}.{os.getpid()}.part")
    if (target / "model_index.json").exists():
        with contextlib.suppress(OSError):
            os.utime(target)  # it is used
        return target
    prune_laid_out(spared_days=1)  # of files that users moved or replaced; running commands keep theirs
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent))
    except OSError as error:
        message = f"{place} is laid out in {target.parent}, which cannot be written to ({(error.strerror or str(error)).lower()})."
        raise UsageError(
            Problem("cache_not_writable", message, "Set LORA_TRAINER_CACHE to a folder that can be written to.")
        ) from error
    try:
        if isinstance(base, SingleFile):
            _from_checkpoint(base, replacement, temporary)
        else:
            _from_folder(base, replacement, temporary)
        os.chmod(temporary, 0o755)
        with contextlib.suppress(OSError):  # another process was first, with the same folder
            os.rename(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    if not (target / "model_index.json").exists():
        message = f"{target} cannot be written."
        raise UsageError(
            Problem("cache_not_writable", message, f"Delete it, or give {laid_out_models()} room and rights.")
        )
    return target


def lacking_parts(base: Path | SingleFile) -> set[str]:
    """The text encoders and tokenizers of its family that a checkpoint or a folder lacks. Raises UsageError."""
    if isinstance(base, SingleFile):
        kinds = text_encoders_of(base.family)
        absent = {name for name, (_, prefix) in kinds.items() if not _is_usable(base.part(prefix))}
        lacking = {tokenizer_of(name) for name, (kind, _) in kinds.items() if name in absent or origins(kind)}
        return absent | lacking | set(tokenizers_alone(base.family))
    family = detect_family(base)
    encoders = text_encoders_of(family)
    names = (*encoders, *map(tokenizer_of, encoders), *tokenizers_alone(family))
    return {part for part in names if not (base / part).is_dir() and (part, tokenizer_folder(base)) != WITHIN}


def places_of_parts(checkpoint: SingleFile) -> dict[str, Mapping[str, Place]]:
    """Where the weights of a checkpoint's denoiser lie, and those of the text encoders that it holds, by component.

    Unlike for `lay_out`, parts may be lacking. Raises UsageError for tensors that no known model has.
    """
    texts = {
        name: text_part(kind, stored).places
        for name, (kind, prefix) in text_encoders_of(checkpoint.family).items()
        if _is_usable(stored := checkpoint.part(prefix))
    }
    return {
        FAMILIES[checkpoint.family].denoiser.component: _spec(checkpoint).denoiser(checkpoint.denoiser).places,
        **texts,
    }


def _spec(checkpoint: SingleFile) -> CheckpointSpec:
    spec = FAMILIES[checkpoint.family].checkpoint
    assert spec is not None  # or the file would not be of this family
    return spec


def _is_usable(stored: Stored) -> bool:
    """Whether there is such a part in a form that is read."""
    return bool(stored.shapes) and not stored.not_read


def _key(base: Path, variant: str, parts: Parts) -> str:
    """A hash of which files these are, and in which state."""
    state: list[Any] = [
        VERSION,
        variant,
        _state(base),
        *([name, path and _state(path)] for name, path in sorted(parts.items())),
    ]
    return hashlib.sha256(json.dumps(state).encode("utf-8", "surrogatepass")).hexdigest()


def _state(path: Path) -> list[Any]:
    found = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
    return [[os.path.abspath(each), (state := each.stat()).st_size, state.st_mtime_ns] for each in found]


def _from_checkpoint(checkpoint: SingleFile, replacement: dict[str, Path | None], target: Path) -> None:
    """Write the folder of a checkpoint. Raises one UsageError for everything that it lacks."""
    family = checkpoint.family
    published = _published(family)
    index = published["model_index"] | published.get("model_index_of", {}).get(checkpoint.variant, {})
    encoders = text_encoders_of(family)
    texts = {name: kind for name, kind in encoders.items() if replacement.get(name, target) is not None}
    problems: list[Problem] = []
    components: dict[str, Part | Path] = {}
    for name, (kind, prefix) in texts.items():
        try:
            components[name] = _text_part(checkpoint, name, kind, prefix, replacement.get(name), READER in index)
        except UsageError as error:
            problems.extend(error.problems)
    others: dict[str, Callable[[], Part | Path]] = {
        FAMILIES[family].denoiser.component: lambda: _denoiser(checkpoint, published.get("denoiser_of", {})),
        "vae": lambda: _vae(checkpoint, published["vae"], replacement.get("vae")),
        **{name: partial(part, checkpoint.denoiser) for name, part in _spec(checkpoint).beside.items()},
    }
    for name, part in others.items():
        try:
            components[name] = part()
        except UsageError as error:
            problems.extend(error.problems)
    tokenizers = {tokenizer_of(name): kind for name, (kind, _) in texts.items()} | tokenizers_alone(family)
    for tokenizer, kind in tokenizers.items():
        try:
            copy_tokenizer(kind, replacement.get(tokenizer), target / tokenizer)
        except UsageError as error:
            problems.extend(error.problems)
    if problems:
        raise UsageError(problems)
    for name, component in components.items():
        _write_part(component, target / name)
    write_json(target / "scheduler" / "scheduler_config.json", _scheduler(checkpoint, published))
    absent = {name: [None, None] for text in set(encoders) - set(texts) for name in (text, tokenizer_of(text))}
    if READER in index:
        (target / READER).mkdir()
        write_json(target / SETTINGS, published[READER])
    write_json(target / "model_index.json", index | absent)


def _published(family: str) -> dict[str, Any]:
    return dict(families()[family]["single_file"])


def _denoiser(checkpoint: SingleFile, changes: Mapping[str, Mapping[str, Any]]) -> Part:
    """The denoiser; its config with the `changes` of a variant or a prediction type, which no shape shows."""
    part = _spec(checkpoint).denoiser(checkpoint.denoiser)
    changed = changes.get(checkpoint.variant or checkpoint.prediction or "", {})
    return replace(part, config={**part.config, **changed})


def _scheduler(checkpoint: SingleFile, published: Mapping[str, Any]) -> dict[str, Any]:
    config = published["scheduler"] | published.get("scheduler_of", {}).get(checkpoint.variant, {})
    if checkpoint.prediction is not None:
        config["prediction_type"] = checkpoint.prediction
    if checkpoint.zero_terminal:
        config["rescale_betas_zero_snr"] = True
    return dict(config)


def _text_part(
    checkpoint: SingleFile, name: str, kind: str, prefix: str, replacement: Path | None, sees: bool
) -> Part | Path:
    """A text encoder: the replacement, else the checkpoint's own; with the half that sees images where it `sees`."""
    if replacement is not None and replacement.is_dir():
        return replacement
    if replacement is not None:
        return text_part(kind, Stored.of(replacement, read_weights_header(replacement), ""), sees=sees)
    stored = checkpoint.part(prefix)
    if not _is_usable(stored):
        may = ", or set model.without_t5" if name in FAMILIES[checkpoint.family].text.optional else ""
        message = f"{checkpoint.file} holds no {name} ({prefix}…)."
        if stored.shapes:
            message = f"{checkpoint.file} holds {name} quantized ({stored.not_read})."
        fix = f"Name a folder that holds {name}/, or its .safetensors file, with model.text_encoders{may}."
        raise UsageError(Problem("model_is_quantized", message, fix))
    return text_part(kind, stored, sees=sees)


def _vae(checkpoint: SingleFile, published: Mapping[str, Any], replacement: Path | None) -> Part | Path:
    """The replacement VAE, where it fits, else the checkpoint's own. Raises UsageError."""
    stored = next((part for prefix in VAE_PREFIXES if (part := checkpoint.part(prefix)).shapes), None)
    own = None if stored is None else _vae_part(stored, published)
    if replacement is not None:
        return _replaced_vae(replacement, published if own is None else own.config)
    if stored is None or own is None:
        message = f"{checkpoint.file} holds no VAE."
        raise UsageError(
            Problem("vae_missing", message, "Name one with model.vae: its folder, or its .safetensors file.")
        )
    refuse_not_read(stored)
    return own


def _vae_part(stored: Stored, published: Mapping[str, Any]) -> Part:
    return video_vae_part(stored, published) if is_video_vae(stored) else vae_part(stored, published)


def _replaced_vae(replacement: Path, own: Mapping[str, Any]) -> Part | Path:
    """A VAE in the place of one with the config `own`. Raises UsageError where it does not fit."""
    part = replacement if replacement.is_dir() else vae_of_file(replacement, own)
    check_vae(own, read_config(part, "config.json") if isinstance(part, Path) else part.config, replacement)
    return part


def vae_of_file(file: Path, published: Mapping[str, Any]) -> Part:
    """A VAE in a file of its own, by names of either layout, or in a checkpoint, whose family sets its scale.

    Raises UsageError for other files.
    """
    header = read_weights_header(file)
    with contextlib.suppress(UsageError):
        published = _published(recognize(file).family)["vae"]
    for prefix in (*VAE_PREFIXES, ""):
        stored = Stored.of(file, header, prefix)
        if "encoder.conv_in.weight" in stored.shapes or is_video_vae(stored):
            refuse_not_read(stored)
            return _vae_part(stored, published)
    raise UsageError(Problem("vae_missing", f"{file} is no VAE.", "Name one with model.vae."))


def _write_part(part: Part | Path, target: Path) -> None:
    """A part's config, and the table of its weights. Raises UsageError for a folder that no library may load."""
    target.mkdir(parents=True, exist_ok=True)
    if isinstance(part, Path):
        check_part(part)
        copy_small(part, target)
        if weights_are_here(part):
            write_places(target, places_of_weights(part))
    else:
        write_json(target / "config.json", part.config)
        write_places(target, part.places)


def _from_folder(base: Path, replacement: dict[str, Path | None], target: Path) -> None:
    """Write the folder of a base folder with replaced parts."""
    index = read_index(base)
    family = detect_family(base)
    kinds = text_encoders_of(family)
    added = {name for name, path in replacement.items() if path is not None}
    for name in sorted({path.name for path in base.iterdir() if path.is_dir()} | added):
        if (
            replacement.get(name, base) is None
            or not name.startswith(NEEDED)
            or (name not in index and name not in replacement)
        ):
            continue
        part: Part | Path = replacement.get(name) or base / name
        if name == "vae" and name in added:
            part = _replaced_vae(replacement["vae"] or base / name, read_config(base, "vae/config.json"))
        elif name in kinds and isinstance(part, Path) and part.is_file():
            part = text_part(kinds[name][0], Stored.of(part, read_weights_header(part), ""), sees=READER in index)
        if isinstance(part, Path) and not (part / "config.json").exists():
            copy_small(part, target / name)  # a tokenizer or the scheduler
        else:
            _write_part(part, target / name)
    absent = {name: [None, None] for name, path in replacement.items() if path is None}
    new = [name for name in added if not any(index.get(name) or ())]
    classes = _published(family)["model_index"] if new else {}
    unused = {
        name: [None, None]
        for name, replaced in index.items()
        if isinstance(replaced, list) and not name.startswith(NEEDED)
    }
    write_json(target / "model_index.json", index | unused | {name: classes[name] for name in new} | absent)
