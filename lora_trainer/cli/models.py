"""`models`: well-known base models, what fits a GPU and what is on this computer; `models get`: download one."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.cli.arguments import say
from lora_trainer.config.presets import selectable, tier_gb
from lora_trainer.core.errors import DONE, Problem, UsageError, nearest
from lora_trainer.core.findings import folded, printable_lines

if TYPE_CHECKING:
    from lora_trainer.run.bases.catalog import CatalogModel
    from lora_trainer.run.bases.programs import FoundModel, Program
    from lora_trainer.run.plans.fits_gpu import Fit

EXAMPLES = """examples:
  lora-trainer models
  lora-trainer models --vram 12
  lora-trainer models get klein-base-4b
  lora-trainer models get owner/name
"""
INDENT = 22


def add_models_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", nargs="?", metavar="get", help="download a model (default: list the models)")
    parser.add_argument("name", nargs="?", metavar="NAME", help="a name of the list, or owner/name of the hub")
    parser.add_argument("--vram", type=float, metavar="GB", help="what fits a GPU of this size (default: this GPU)")
    parser.add_argument("--again", action="store_true", help="get: download it though another program has it here")
    parser.add_argument("--revision", metavar="REVISION", help="get: a branch, tag or commit (default: main)")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")


def models_command(arguments: argparse.Namespace, unknown: list[Problem]) -> int:
    """List the models, or download one. Raises UsageError."""
    problems = list(unknown)
    if arguments.action not in (None, "get"):
        problems.append(
            Problem("unknown_action", f"Unknown action {arguments.action}.", nearest(arguments.action, ["get"]))
        )
    elif arguments.action == "get" and arguments.name is None:
        problems.append(
            Problem("argument_missing", "models get needs a name.", "For example: models get klein-base-4b")
        )
    if arguments.vram is not None and not 1 <= arguments.vram <= 1024:
        problems.append(
            Problem("vram_out_of_range", f"--vram is {arguments.vram:g}, must be 1 to 1024.", "It is in GB: --vram 12")
        )
    if problems:
        raise UsageError(problems)
    return get_model(arguments) if arguments.action else list_models(arguments)


@dataclass(frozen=True)
class ListedModel:
    """A model of the list, its memory by size of GPU, and where it lies on this computer."""

    model: CatalogModel
    fits: tuple[Fit, ...]
    here: tuple[Path, ...]

    def to_json(self) -> dict[str, Any]:
        model = self.model
        return {
            "name": model.name,
            "family": model.family,
            "hub_id": model.hub_id,
            "license": model.license,
            "gated": model.is_gated,
            "download_bytes": model.download_bytes,
            "fits": [fit.to_json() for fit in self.fits],
            "here": [str(path) for path in self.here],
        }


# The list


def list_models(arguments: argparse.Namespace) -> int:
    """Print every model."""
    from lora_trainer.run.bases.catalog import catalog
    from lora_trainer.run.bases.programs import find_files, find_programs
    from lora_trainer.run.plans.fits_gpu import fit_of

    gpu = arguments.vram
    if gpu is None:
        from lora_trainer.run.choices import gpu_gib_for_auto

        gpu = gpu_gib_for_auto([])
    # Without a GPU the sizes of the VRAM presets.
    sizes = [gpu] if gpu is not None else sorted(float(size) for name in selectable() if (size := tier_gb(name)))
    programs = find_programs()
    files = find_files(programs)
    listed = []
    for model in catalog().values():
        plans = (fit_of(model.family, size) for size in sizes) if model.is_planned else ()
        fits = tuple(fit for fit in plans if fit is not None)
        listed.append(ListedModel(model, fits, tuple(places_of(model, files))))
    if arguments.json:
        document = {
            "gpu_gib": gpu,
            "models": [each.to_json() for each in listed],
            "programs": [{"name": each.title, "folder": str(each.folder)} for each in programs],
            "files": [{"path": str(each.path), "family": each.family} for each in files],
        }
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
        return DONE
    for line in (
        *(line for each in listed for line in model_lines(each)),
        *summary_lines(gpu, programs, files, listed),
    ):
        sys.stdout.write(printable_lines(line) + "\n")
    return DONE


def places_of(model: CatalogModel, files: list[FoundModel]) -> list[Path]:
    """Where a model lies on this computer: in the hub's cache, or under its published name in another program's folder."""
    from lora_trainer.run.bases.hub import complete_in_cache
    from lora_trainer.run.bases.names import HubModel

    cached = complete_in_cache(HubModel(model.hub_id))
    names = {name.lower() for name in model.checkpoints}
    others = [file.path for file in files if file.family == model.family and file.path.stem.lower() in names]
    return [cached, *others] if cached is not None else others


def model_lines(listed: ListedModel) -> list[str]:
    """A model in two lines, three where it is on this computer."""
    model = listed.model
    size = "size not known" if model.download_bytes is None else f"{model.download_bytes / 1e9:.1f} GB"
    terms = model.license or "license not known"
    gate = {True: ", gated", False: "", None: ", gate not known"}[model.is_gated]
    about = folded(f"{size}, {terms}{gate}; {fit_words(listed.fits)}", sys.stdout, INDENT)
    here = [f"{' ' * INDENT}here: {path}" for path in listed.here]
    return [f"{model.name:<{INDENT}}{model.hub_id}", f"{' ' * INDENT}{about}", *here]


def fit_words(fits: tuple[Fit, ...]) -> str:
    """What a model needs: of one size of GPU how it fits, of several from which on, without and with block swap."""
    if not fits:
        return "memory: not planned here"
    fitting = [fit for fit in fits if fit.fits]
    if not fitting:
        return f"does not fit {fits[-1].gib:.3g} GB"
    if len(fits) == 1:
        return f"fits {fits[0].gib:.3g} GB: {how_it_fits(fits[0])}"
    whole = next((fit for fit in fitting if fit.blocks_to_swap == 0), None)
    if whole is None:
        return f"fits from {fitting[0].gib:g} GB: {how_it_fits(fitting[0])}"
    smaller = f"; from {fitting[0].gib:g} GB with block swap" if fitting[0] is not whole else ""
    return f"fits from {whole.gib:g} GB: {how_it_fits(whole)}{smaller}"


def how_it_fits(fit: Fit) -> str:
    swapped = f", {fit.blocks_to_swap} of {fit.blocks} blocks swapped" if fit.blocks_to_swap else ""
    return f"{fit.resolution} px, {fit.weight_dtype}{swapped}, {fit.spare_gib:.1f} GiB to spare"


def summary_lines(
    gpu: float | None, programs: list[Program], files: list[FoundModel], listed: list[ListedModel]
) -> list[str]:
    """What the list leaves open, and what is on this computer besides."""
    lines = []
    if gpu is None:
        lines.append("No GPU found: the smallest GPU that fits each is shown. --vram 12 asks about one size.")
    if any(None in (each.model.download_bytes, each.model.license, each.model.is_gated) for each in listed):
        lines.append(
            "Not known here: `models get` reads the size from the hub and prints it first; the page has the license."
        )
    if any(not each.fits for each in listed):
        lines.append("Memory that is not planned here: lora-trainer plan --model OWNER/NAME --preset 12gb")
    lines += [f"{program.title}: {program.folder}" for program in programs]
    known = {path for each in listed for path in each.here}
    lines += [f"{file.family}: {file.path}" for file in files if file.path not in known]
    lines.append("Use: lora-trainer models get NAME, then lora-trainer train --model OWNER/NAME, or --model PATH")
    return [folded(line, sys.stdout) for line in lines]


# Download


def get_model(arguments: argparse.Namespace) -> int:
    """Download a model, or say where it is. Raises UsageError."""
    from lora_trainer.run.bases.catalog import find_model
    from lora_trainer.run.bases.hub import find_snapshot
    from lora_trainer.run.bases.names import HubModel
    from lora_trainer.run.bases.programs import find_files, find_programs

    model = find_model(arguments.name)
    hub_id = arguments.name if model is None else model.hub_id
    if model is not None and arguments.revision is None and not arguments.again:
        files = find_files(find_programs())
        if places := places_of(model, files):
            return _print_model(arguments, hub_id, places[0], training_command(places[0], hub_id, files))
    if model is not None:
        gate = f"; it is gated: agree on {model.page}" if model.is_gated else ""
        say(f"{hub_id}: license {model.license or f'on {model.page}'}{gate}")
    named = HubModel(hub_id, arguments.revision, origin="the name")
    found = find_snapshot(named, weights=True, without_t5=False, offline=False, say=say)
    revision = [f"--set model.revision={arguments.revision}"] if arguments.revision else []
    return _print_model(arguments, hub_id, found.folder, " ".join(["--model", hub_id, *revision]))


def training_command(place: Path, hub_id: str, files: list[FoundModel]) -> str:
    """The arguments with which `train` uses a model of this computer; of a denoiser alone with its program's text encoders."""
    file = next((each for each in files if each.path == place), None)
    if file is None:
        return f"--model {hub_id}"
    command = f"--model {shlex.quote(str(place))}"
    if file.program.text_encoders is None or place.parent.name.lower() in ("checkpoints", "stable-diffusion"):
        return command
    return f"{command} --set model.text_encoders={shlex.quote(str(file.program.text_encoders))}"


def _print_model(arguments: argparse.Namespace, hub_id: str, place: Path, command: str) -> int:
    if arguments.json:
        sys.stdout.write(json.dumps({"hub_id": hub_id, "path": str(place), "arguments": command}, indent=2) + "\n")
        return DONE
    sys.stdout.write(printable_lines(f"{hub_id} is here: {place}") + "\n")
    sys.stdout.write(printable_lines(f"Use: lora-trainer train {command} --data ./images --preset auto") + "\n")
    return DONE
