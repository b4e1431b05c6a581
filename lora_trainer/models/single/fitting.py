"""Find the parts that a base model lacks, and check whether another VAE fits. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.gguf_file import read_weights_header
from lora_trainer.models.autoencoder import CHANNELS, USUAL, VIDEOS
from lora_trainer.models.folder import read_config, tokenizer_folder
from lora_trainer.models.single.stored import Stored, refuse_not_read
from lora_trainer.models.single.texts import kind_of_file, text_encoders_of

SHOWN = 6  # names in a message
USUAL_SCALE = 0.18215  # diffusers' own, where a config names none


def check_vae(own: Mapping[str, Any], other: Mapping[str, Any], named: Path) -> None:
    """Raise UsageError, all problems at once, where the model was not trained on latents like those of the VAE `other`.

    Both are configs. Differences that configs do not show, such as other latents of the same shape, are not noticed.
    """
    facts: list[tuple[str, str, object]] = [
        ("the class", "_class_name", USUAL),
        ("latent channels", "latent_channels", 4),
    ]
    facts += [("a scaling_factor of", "scaling_factor", USUAL_SCALE), ("a shift_factor of", "shift_factor", None)]
    kinds = {config.get("_class_name", USUAL) for config in (own, other)}
    if kinds & set(VIDEOS):  # whose numbers have other names; those of another class say nothing
        own_facts = [
            ("latent channels", "z_dim", 16),
            ("a mean of", "latents_mean", None),
            ("a deviation of", "latents_std", None),
        ]
        facts = [facts[0], *(own_facts if len(kinds) == 1 else ())]
    problems = []
    for words, key, usual in facts:
        ours, theirs = own.get(key, usual), other.get(key, usual)
        if (ours or 0) != (theirs or 0):
            difference = f"{theirs} {words}" if words == "latent channels" else f"{words} {theirs}"
            message = f"model.vae: {named} has {difference}, and the model's own has {ours}."
            problems.append(Problem("vae_differs", message, "Name a VAE of the same family, or remove model.vae."))
    levels, theirs = (len(config.get("block_out_channels", config.get("dim_mult", ()))) for config in (own, other))
    if levels and theirs and levels != theirs:  # a published one leaves them to the file
        message = f"model.vae: {named} makes images {2 ** (theirs - 1)} times smaller, and the model's own {2 ** (levels - 1)} times."
        problems.append(Problem("vae_differs", message, "Name a VAE of the same family, or remove model.vae."))
    if problems:
        raise UsageError(problems)


def vae_folder(named: Path) -> Path:
    """A VAE's own folder: the one that is named, or `vae/` in it; a file stays one. Raises UsageError."""
    if not named.exists():
        raise UsageError(
            Problem("vae_missing", f"There is no VAE at {named}.", "Check model.vae: its folder, or its file.")
        )
    if named.is_file():
        return named
    folder = named / "vae" if (named / "vae" / "config.json").exists() else named
    if not (folder / "config.json").exists():
        message = f"{named} holds no VAE: neither config.json nor vae/config.json."
        raise UsageError(Problem("vae_missing", message, "Name a diffusers folder of a VAE, or its .safetensors file."))
    config = read_config(folder, "config.json")
    usual = USUAL if "block_out_channels" in config else config.get("model_type", "part of another kind")
    kind = config.get("_class_name", usual)
    if kind not in CHANNELS:
        message = f"{folder} is a {str(kind)[:80]}, not an {' or an '.join(CHANNELS)}."
        raise UsageError(Problem("vae_unsupported", message, "Name a VAE with model.vae."))
    return folder


def find_text_parts(named: Path, wanted: set[str], family: str) -> dict[str, Path]:
    """The wanted parts of a family that are there: folders of parts in a folder, or single files of text encoders.

    `named` is a folder or one file. Raises UsageError where it has none of them, and for several files that could be
    meant.
    """
    if not named.exists():
        message = f"model.text_encoders: there is no file or folder {named}."
        raise UsageError(
            Problem("file_missing", message, "Name a folder that holds text_encoder_2/, tokenizer_2/ and so on.")
        )
    there = {
        path.name: path
        for path in (named.iterdir() if named.is_dir() else ())
        if path.is_dir() and (path.name.startswith("text_encoder") or "tokenizer" in path.name)
    }
    if "tokenizer" in wanted and named.is_dir() and tokenizer_folder(named) == "processor":
        there["tokenizer"] = named / "processor"
    files = [named] if named.is_file() else sorted([*named.glob("*.safetensors"), *named.glob("*.gguf")])
    encoders = text_encoders_of(family)
    sought = {name: encoders[name][0] for name in sorted(wanted - set(there)) if name in encoders}
    held = [*sorted(there), *(file.name for file in files)]
    if not held:
        message = f"model.text_encoders: {named} holds neither text_encoder/ nor tokenizer/, with or without a number, nor files."
        raise UsageError(
            Problem("text_encoders_missing", message, "Name a diffusers folder, or one laid out likewise.")
        )
    used = {name: path for name, path in there.items() if name in wanted} | _single_files(files, sought)
    if not used:
        lacks = f"lacks {', '.join(sorted(wanted))}" if wanted else "has its own"
        message = f"model.text_encoders: {named} holds {', '.join(held[:SHOWN])}, and the model {lacks}."
        fix = f"Name a folder that holds {', '.join(sorted(wanted))}." if wanted else "Remove model.text_encoders."
        raise UsageError(Problem("text_encoders_unknown", message, fix))
    return used


def _single_files(files: Sequence[Path], sought: Mapping[str, str]) -> dict[str, Path]:
    """The file of each text encoder in `sought`: the largest, which has the most bits.

    Files that cannot be read or are quantized are skipped, and are the errors where a kind is in no other file.
    """
    found: dict[str, list[Path]] = {name: [] for name in sought}
    problems: list[Problem] = []
    for file in files if sought else ():
        try:
            stored = Stored.of(file, read_weights_header(file), "")
            names = [
                name
                for name, kind in sought.items()
                if kind_of_file(stored) == kind.removeprefix("open_").removesuffix("_projected")
            ]
            if names:
                refuse_not_read(stored)
        except UsageError as error:
            problems.extend(error.problems)
            continue
        for name in names:
            found[name].append(file)
    if problems and not all(found.values()):
        raise UsageError(problems)
    chosen = {}
    for name, same in found.items():
        sizes = sorted((file.stat().st_size for file in same), reverse=True)
        if len(sizes) > 1 and sizes[0] == sizes[1]:
            paths = " and ".join(str(file) for file in same if file.stat().st_size == sizes[0])
            raise UsageError(
                Problem(
                    "text_encoders_ambiguous",
                    f"model.text_encoders: {paths} may both be {name}.",
                    "Name a folder with one of them.",
                )
            )
        if same:
            chosen[name] = max(same, key=lambda file: file.stat().st_size)
    return chosen
