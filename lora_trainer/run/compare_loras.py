"""Compare the strengths of a LoRA and a run's kept steps: which one to use (`gates.compare`, `validate --compare`)."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.core.errors import MACHINE_FAILURES, UserError, first_line
from lora_trainer.core.io import atomic_path
from lora_trainer.core.tensorfile import METADATA, read_tensor_header
from lora_trainer.evaluation.choice import STRENGTHS, compare_candidates
from lora_trainer.evaluation.compute import Compute
from lora_trainer.evaluation.lora_choice import Candidate, LoraChoice
from lora_trainer.evaluation.placing import with_less
from lora_trainer.evaluation.recipe import Grid, NamedModel
from lora_trainer.evaluation.sample import Where, compare
from lora_trainer.evaluation.sheet import SheetGroup, SheetRow, contact_sheet, save_image
from lora_trainer.run.choices import usable_bytes
from lora_trainer.run.counting import COMPARED, counting
from lora_trainer.run.kept_steps import RunFiles, kept_steps, run_files
from lora_trainer.run.release import WEIGHTS
from lora_trainer.run.sampling import BUILT_IN, drawing_of, parts_of, prefixed, rows_for, run_drawing, sample_rows
from lora_trainer.training.checkpoints.checkpoint import step_name

if TYPE_CHECKING:
    from lora_trainer.config.schema import Config
    from lora_trainer.config.schema.types import CompareName
    from lora_trainer.evaluation.evidence import RealImages
    from lora_trainer.evaluation.lora_check import LoraGate
    from lora_trainer.evaluation.lora_report import LoraReport
    from lora_trainer.models.family import Family, ModelFacts
    from lora_trainer.run.session import Session

SHEET = "compared"  # name of the sheet of the candidates
FAILURES = (*MACHINE_FAILURES, UserError)  # that leave a LoRA its verdict
UNCOMPARED = "strengths and steps could not be compared"

Draw = Callable[[Sequence[Candidate]], Path]


@dataclass(frozen=True)
class ComparedLoras:
    """What is compared, on which base model, with which images, and how.

    `run` has the files of the LoRA's run, None for a file alone; `config` is the run's. `draw` makes a sheet of the
    candidates and returns its path; None makes none.
    """

    what: CompareName
    lora: Path
    run: RunFiles | None
    config: Config
    family: Family
    base: Path
    images: RealImages
    gate: LoraGate
    draw: Draw | None = None


def compare_loras(wanted: ComparedLoras, compute: Compute, say: Callable[[str], None]) -> LoraChoice | None:
    """Compare a LoRA's strengths, its run's kept steps at strength 1, or both, with the LoRA as it is.

    The file of another step that is chosen is kept in the run's folder `weights`. None where there is nothing to compare.
    """
    with tempfile.TemporaryDirectory() as place:
        candidates = candidates_of(wanted, Path(place), say)
        if len(candidates) == 1:
            say("no other steps of this run are kept: checkpoint.export_every_n_steps keeps some")
            return None
        compared = partial(compare_candidates, candidates, wanted.base, wanted.family, wanted.images, wanted.gate)
        choice = with_less(compared, compute)
        if choice is None:
            say("nothing to compare strengths or steps with")
            return None
        choice = replace(choice, file=keep_chosen(choice.chosen.file, wanted.run))
        if wanted.draw is None:
            return choice
        try:
            return replace(choice, sheet=wanted.draw([each.candidate for each in choice.scores]))
        except FAILURES as error:  # the comparison is complete
            say(f"no images of the compared strengths and steps: {first_line(error)}")
            return choice


def candidates_of(wanted: ComparedLoras, place: Path, say: Callable[[str], None]) -> list[Candidate]:
    """The LoRA as it is, its other strengths, and the run's other steps, whose files may be written to `place`."""
    header = read_tensor_header(wanted.lora).get(METADATA, {})
    named = int(header["ss_steps"]) if re.fullmatch(r"[0-9]{1,9}", header.get("ss_steps", "")) else None
    usual = Candidate(wanted.lora, named if wanted.run is None else wanted.run.step)
    found = [usual]
    if wanted.what in ("strengths", "both"):
        found += [replace(usual, strength=each) for each in STRENGTHS if each != usual.strength]
    if wanted.what in ("checkpoints", "both") and wanted.run is not None:
        steps = kept_steps(wanted.run, wanted.config, wanted.family, place, say)
        found += [Candidate(path, step) for step, path in sorted(steps.items())]
    return found


def keep_chosen(chosen: Path, run: RunFiles | None) -> str:
    """The chosen file where it stays, relative to the run's folder: one that was written for the comparison is copied."""
    if run is None:
        return chosen.name
    if run.folder.resolve() in chosen.resolve().parents:
        return chosen.resolve().relative_to(run.folder.resolve()).as_posix()
    target = run.folder / WEIGHTS / chosen.name
    with atomic_path(target) as temporary:
        shutil.copyfile(chosen, temporary)
    return target.relative_to(run.folder).as_posix()


def compare_after_training(
    session: Session, images: RealImages, lora: Path, step: int, report: LoraReport, gate: LoraGate
) -> LoraChoice | None:
    """What `gates.compare` requests of a run's exported LoRA, of the weights of `step`, if it works.

    `gate` is the one of the verdict. A comparison that fails is printed and is None: the LoRA has its verdict.
    """
    config, inputs, choices = session.config, session.inputs, session.choices
    for path in (session.folder / "samples").glob(f"{SHEET}*"):  # of an earlier end of this run
        if path.suffix in (".json", ".png"):
            path.unlink(missing_ok=True)
    if config.gates.compare == "off" or report.parts["works"].outcome() != "passed":
        return None
    say = partial(session.console.print, markup=False)
    compute = Compute(choices.dtype, choices.device, usable_bytes(config, choices.device), say=say)
    try:
        rows = sample_rows(config, inputs, [config.train.seed])
        model = NamedModel(inputs.family, inputs.facts.path, config.model.path or BUILT_IN, parts_of(config))
        grid, folder = Grid(rows, run_drawing(config, inputs)), session.folder / "samples"
        wanted = ComparedLoras(
            config.gates.compare,
            lora,
            RunFiles(session.folder, lora, step),
            config,
            inputs.family,
            inputs.facts.path,
            images,
            gate,
            partial(draw_candidates, model, grid, folder, compute),
        )
        with counting(session.console) as count:
            return compare_loras(wanted, replace(compute, progress=count(COMPARED)), say)
    except FAILURES as error:
        say(f"{UNCOMPARED}: {first_line(error)}")
        return None


def compare_file(
    lora: Path,
    trained: Config | None,
    config: Config,
    measured: tuple[Family, ModelFacts, RealImages, LoraGate],
    compute: Compute,
) -> LoraChoice | None:
    """What `gates.compare` requests of a LoRA file. `trained` are the settings of the run beside it, None without one.

    A sheet is drawn among the run's samples. A comparison that fails is reported and is None: the LoRA has its verdict.
    """
    family, facts, images, gate = measured
    try:
        run = None if trained is None else run_files(lora)
        captions = list(dict.fromkeys(each.text for each in images.every))
        prompts = config.sample.prompts or captions[: config.sample.count]
        prompts = [prefixed(prompt, config.sample.prompt_prefix) for prompt in prompts]
        rows = rows_for(prompts, [config.train.seed])
        grid = Grid(rows, drawing_of(config, family, facts, (facts.resolution, facts.resolution)))
        model = NamedModel(family, facts.path, config.model.path or BUILT_IN, parts_of(config))
        draw = None if run is None else partial(draw_candidates, model, grid, run.folder / "samples", compute)
        what = config.gates.compare
        wanted = ComparedLoras(what, lora, run, trained or config, family, facts.path, images, gate, draw)
        with counting() as count:
            return compare_loras(wanted, replace(compute, progress=count(COMPARED)), compute.say)
    except FAILURES as error:
        compute.say(f"{UNCOMPARED}: {first_line(error)}")
        return None


def draw_candidates(
    model: NamedModel, grid: Grid, folder: Path, compute: Compute, candidates: Sequence[Candidate]
) -> Path:
    """Images of the grid's prompts without the LoRA and with each candidate, side by side; the path of their sheet."""
    files = list(dict.fromkeys(each.file for each in sorted(candidates, key=lambda each: each.step or 0)))
    columns: list[tuple[str, list[Path]]] = []
    for file in files:
        own = sorted((each for each in candidates if each.file == file), key=lambda each: each.strength)
        where = Where(folder, SHEET if len(files) == 1 else f"{SHEET}-{step_name(own[0].step or 0)}")
        strengths = tuple(each.strength for each in own)
        with_less(
            partial(compare, model, file, replace(grid, drawing=replace(grid.drawing, strengths=strengths)), where),
            compute,
        )
        rows = range(len(grid.rows))
        columns = columns or [("untouched base", [where.image(row, None) for row in rows])]
        columns += [(each.name, [where.image(row, each.strength) for row in rows]) for each in own]
    sheet = Where(folder, SHEET).sheet
    if len(files) > 1:
        groups = [
            SheetGroup(
                row.prompt or "(empty prompt)", [SheetRow(f"seed {row.seed}", [images[index] for _, images in columns])]
            )
            for index, row in enumerate(grid.rows)
        ]
        title = f"{len(files)} steps of {folder.resolve().parent.name}"
        details = f"{grid.drawing.steps} steps of sampling"
        save_image(sheet, contact_sheet(title, details, [heading for heading, _ in columns], groups))
    return sheet
