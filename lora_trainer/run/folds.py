"""Do a run's settings and images generalize? `validate --folds` trains two more LoRAs, each on one half of the images, and
measures each on the other half.

It is for runs that trained on all of their images: none of these is left to measure `learned` on. Both LoRAs are runs of their
own inside the run's folder, `folds/1` and `folds/2`, with its settings (`validation.fold`). Each trains for as many epochs as the
run, so for half of its steps: each image is trained as often. What they give is kept in `folds/learned.json`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.adapters.adapter_kinds import ADAPTERS
from lora_trainer.config.layers import DEFAULT, Resolved
from lora_trainer.config.resuming import CHANGES_NOTHING
from lora_trainer.config.schema import Config
from lora_trainer.config.toml import setting_names
from lora_trainer.core.errors import LoraRefused, Problem, UsageError, gathering
from lora_trainer.core.findings import Finding, counted
from lora_trainer.core.interrupt import Stopped
from lora_trainer.core.io import read_json, sha256_file, write_json
from lora_trainer.data.sample import Sample
from lora_trainer.data.split import FEWEST_FOR_FOLDS
from lora_trainer.data.views import BucketPlan
from lora_trainer.evaluation.lora_report import LoraReport
from lora_trainer.evaluation.verdict import Estimate, VerdictPart
from lora_trainer.models.base_loras import base_digest
from lora_trainer.report import FILE as REPORT
from lora_trainer.report import write_report
from lora_trainer.report.read import keeps_state
from lora_trainer.report.record import FILE as RECORD
from lora_trainer.report.record import read_record
from lora_trainer.run.bases.encoder import find_encoder
from lora_trainer.run.bases.find import describe_model, silent
from lora_trainer.run.bases.names import absolute
from lora_trainer.run.differences import changes
from lora_trainer.run.folder import is_finished, locked
from lora_trainer.run.inputs import Inputs, arithmetic, data_in_use, measured_among, read_inputs, read_model
from lora_trainer.run.order import Order, plain_console
from lora_trainer.run.reading import RunFolder, run_beside
from lora_trainer.run.train import train

if TYPE_CHECKING:
    from torch import Tensor

    from lora_trainer.evaluation.compute import Compute
    from lora_trainer.evaluation.lora_check import LoraGate

FOLDER, FILE = "folds", "learned.json"  # in a run's folder; in that one
FOLDS = (1, 2)
BY_FOLDS = "learned_by_folds"  # the code of the note that says what `learned` is then of

Say = Callable[[str], None]


@dataclass(frozen=True)
class Fold:
    """One of the two runs. Its validation images are the half that it does not train on."""

    number: int
    folder: Path
    config: Config
    inputs: Inputs

    @property
    def lora(self) -> Path:
        """Its LoRA in kohya's format."""
        return self.folder / f"{self.number}.safetensors"

    @property
    def measured(self) -> list[int]:
        """The places of the validation images that it is measured on: those of a verdict, each content once."""
        return measured_among((), self.inputs.validation)


@data_in_use()
def measure_folds(lora: Path, data: Path | None, config: Config, say: Say) -> None:
    """Train what is missing of both folds of a LoRA's run, measure them, and keep that beside the run and in its record.

    `config` are the verdict's settings, and `data` its images. A training that is stopped continues with the next call.

    Raises UsageError, all problems at once, for a run that cannot be measured so, and where another process trains it;
    Stopped for a signal; LoraRefused for a fold whose LoRA does not work.
    """
    folder = lora.parent
    if lora.is_dir() or not (folder / RECORD).is_file():
        message = f"{lora} is not a run: it has no {RECORD} that names its LoRA."
        raise UsageError(Problem(message, "--folds needs the folder of a run, such as runs/cat."))
    with locked(folder, "Wait for it."):
        record = read_record(folder) or {}
        folds = find_folds(lora, record, data, config)
        for fold in folds:
            say(
                f"fold {fold.number}: {counted(fold.config.train.max_steps or 0, 'step')} on one half of the images,"
                f" measured on the {len(fold.measured)} others ({fold.folder})"
            )
        trained = [train_fold(fold, record, say) for fold in folds]
        kept = None if any(trained) else kept_folds(lora, record["data_hash"])
        if kept is None:
            say("validation loss of both folds, with and without their LoRAs")
            loras = [str(name) for name in record["files"].values() if str(name).endswith(".safetensors")]
            there = [name for name in loras if (folder / name).is_file()]
            kept = {
                "files": {name: sha256_file(folder / name) for name in there},
                "data_hash": record["data_hash"],
                "learning": measured_by(folds, config, say),
            }
            write_json(folder / FOLDER / FILE, kept)
        put_on_record(folder, record, kept, say)


def find_folds(lora: Path, record: dict[str, Any], data: Path | None, config: Config) -> list[Fold]:
    """Both folds of a run. Raises UsageError with everything that speaks against measuring them."""
    folder, problems = lora.parent, list[Problem]()
    if not is_finished(record):
        message = f"{folder} is not finished (status {record.get('status')})."
        problems.append(
            Problem(message, "Finish it first, with --resume." if keeps_state(record) else "Train it again.")
        )
    elif lora.name not in record.get("files", {}).values() or not lora.is_file():
        problems.append(Problem(f"{lora} is not a LoRA that this run exported.", f"Name the run's folder: {folder}"))
    if kept := record.get("dataset", {}).get("validation"):
        message = f"{folder} has {counted(kept, 'validation image')}: `learned` is measured on these."
        problems.append(Problem(message, "Leave --folds out."))
    works = recorded_parts(record).get("works")
    if works is not None and works.outcome() == "refused":
        message = f"The LoRA in {folder} does not work, so folds of its run show nothing."
        problems.append(Problem(message, "Train the run again with a lower learning rate."))
    if data is not None:
        problems.append(Problem("--folds measures on the images that the run trained on.", "Leave --data out."))
    with gathering(problems):
        find_encoder(config, say=silent)
    run, folds = run_beside(lora), list[Fold]()
    if run is None:
        problems.append(Problem(f"The settings in {folder / RECORD} cannot be read.", "Train it again."))
    else:
        if not has_base_of(run, config):
            message = f"--folds trains on the run's base model: {describe_model(run.config.model)}."
            problems.append(Problem(message, "Leave --model out."))
        if not ADAPTERS[run.config.lora.type].is_checked:
            problems.append(Problem(f"lora.type={run.config.lora.type} cannot be measured.", "Leave --folds out."))
        with gathering(problems):
            folds = folds_of(folder, run, record)
    if problems:
        raise UsageError(problems)
    return folds


def has_base_of(run: RunFolder, config: Config) -> bool:
    """Whether the settings name the base model of the run."""
    path = config.model.path
    return (path and absolute(path)) == run.config.model.path


def folds_of(folder: Path, run: RunFolder, record: Mapping[str, Any]) -> list[Fold]:
    """Both folds, from the run's settings and its data as it is now. Raises UsageError for another base model or data."""
    family, facts = read_model(run.config)
    problems, read = list[Problem](), list[Inputs]()
    if record.get("model", {}).get("sha256") != base_digest(family, facts.path):
        message = "The base model's weights have changed since the run."
        problems.append(Problem(message, "Use the model that it was trained on, or train the run again."))
    halves = [with_settings(run.config, {"validation": {"split": None, "fold": number}}) for number in FOLDS]
    with gathering(problems):
        read = [read_inputs(half, (family, facts)) for half in halves]
    if not read:
        raise UsageError(problems)
    everything = (*read[0].train, *read[0].validation)
    images = {sample.content for sample in everything if not sample.regularization}
    if read[0].manifest.data_hash != run.data_hash:
        message = "The run's images, captions or weights have changed since it was trained."
        problems.append(Problem(message, "Change them back, or train the run again."))
    elif len(images) < FEWEST_FOR_FOLDS:
        message = f"The run has {counted(len(images), 'distinct image')}; two folds need at least {FEWEST_FOR_FOLDS}."
        problems.append(Problem(message, "Add images, and train the run again."))
    elif not all(inputs.validation for inputs in read):
        message = "The images cannot be split into two halves: all look alike, or like regularization images."
        problems.append(Problem(message, "Add images that differ, and train the run again."))
    if problems:
        raise UsageError(problems)
    folds = []
    for number, half, inputs in zip(FOLDS, halves, read, strict=True):
        share = steps_per_epoch(half, inputs.train) / steps_per_epoch(half, everything)
        steps, warmup = max(1, round(record["steps"] * share)), half.lr_scheduler.warmup_steps
        averaged = half.train.swa_start  # a share of the steps stays one
        if isinstance(averaged, int):
            averaged = max(1, min(round(averaged * share), steps - 1))
        sections: dict[str, dict[str, Any]] = {
            "run": {
                "output": str((folder / FOLDER).resolve()),
                "name": str(number),
                "trackers": (),
                "on_finish": None,
                "on_failure": None,
            },
            "train": {"max_steps": steps, "max_epochs": None, "max_hours": None, "swa_start": averaged},
            "lr_scheduler": {"warmup_steps": warmup and round(warmup * share)},
            # The half that is kept out is only measured on: no step is chosen by it.
            "validation": {"every_n_steps": 0, "agreement": False},
            "checkpoint": {
                "export_weights": "last",
                "export_every_n_steps": 0,
                "export_every_n_epochs": 0,
                "save_state": True,  # a fold that is stopped continues
                "scratch": None,
            },
            "sample": {"every_n_steps": 0},
            "gates": {"lora_check": "off", "compare": "off"},
        }
        folds.append(Fold(number, folder / FOLDER / str(number), with_settings(half, sections), inputs))
    return folds


def steps_per_epoch(config: Config, samples: tuple[Sample, ...]) -> int:
    return arithmetic(config, samples, config.train.effective_batch_size, processes=1).steps_per_epoch


def with_settings(config: Config, sections: Mapping[str, Mapping[str, Any]]) -> Config:
    """The same config with other values of some settings."""
    return config.model_copy(
        update={name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    )


def train_fold(fold: Fold, run: Mapping[str, Any], say: Say) -> bool:
    """Train a fold, or what is left of it; false where it is trained already. `run` is the record of the whole run.

    A fold of other settings, data or base model is replaced, and one whose LoRA is gone. Raises Stopped for a signal,
    UserError as any training.
    """
    record = read_record(fold.folder)
    if record is not None and (differing := differences_of(record, fold, run)):
        say(f"fold {fold.number} has {', '.join(differing)}: training it again")
        with locked(fold.folder, "Wait for it."):
            pass
        shutil.rmtree(fold.folder)
        record = None
    if is_finished(record):
        say(f"fold {fold.number} is trained already")
        return False
    (fold.folder.parent / FILE).unlink(missing_ok=True)  # of the fold as it was before
    origins = {name: run["origins"].get(name, DEFAULT) for name in setting_names()}
    order = Order(Resolved(fold.config, origins), fold.folder, plain_console(stderr=True), resume=record is not None)
    if code := train(order).exit_code:
        say("The same command continues the folds.")
        raise Stopped(code)
    return True


def differences_of(record: dict[str, Any], fold: Fold, run: Mapping[str, Any]) -> list[str]:
    """What a fold's record differs in from what it would be now: settings that change a step, data, base model, LoRA."""
    settings = changes(record, fold.config.model_dump(mode="json"))
    others = [f"{name} {change}" for name, change in settings.items() if name not in CHANGES_NOTHING]
    found = [f"other settings ({', '.join(others)})"] if others else []
    if record.get("data_hash") != run["data_hash"]:
        found.append("other data")
    trained_on = record.get("model", {}).get("sha256")
    if trained_on not in (None, run["model"]["sha256"]):  # none before its first step
        found.append("another base model")
    if is_finished(record) and not fold.lora.is_file():
        found.append("no LoRA file")
    return found


def measured_by(folds: Sequence[Fold], config: Config, say: Say) -> dict[str, Any]:
    """The gain of each fold on the images that it did not see, and of all of these together, as a verdict has it."""
    import torch

    from lora_trainer.evaluation.compute import Compute
    from lora_trainer.evaluation.loading import free_memory
    from lora_trainer.evaluation.lora_check import LoraGate
    from lora_trainer.evaluation.placing import with_less
    from lora_trainer.evaluation.tracking import gain_by_noise
    from lora_trainer.evaluation.validation_loss import improvement
    from lora_trainer.run.caching import cache_folder
    from lora_trainer.run.choices import evaluated_on, usable_bytes

    device, dtype = evaluated_on(config)
    gate, losses = LoraGate(cache=cache_folder(config)), []
    for fold in folds:
        compute = Compute(dtype, device, usable_bytes(config, device), say=say)
        losses.append(with_less(partial(fold_losses, fold, gate), compute))
        free_memory(device)  # of this fold's model, which its pipeline refers to in a cycle
    each = [
        {"steps": fold.config.train.max_steps, "images": len(fold.measured), **asdict(improvement(*own))}
        for fold, own in zip(folds, losses, strict=True)
    ]
    base, lora = (torch.cat(side) for side in zip(*losses, strict=True))
    by_noise = {name: asdict(band) for name, band in gain_by_noise(base, lora).items()}
    return asdict(improvement(base, lora)) | {"by_noise": by_noise, "folds": each}


def fold_losses(fold: Fold, gate: LoraGate, compute: Compute) -> tuple[Tensor, Tensor]:
    """Losses [N, T] without and with a fold's LoRA on the N images that it did not see. Raises LoraRefused."""
    from lora_trainer.evaluation.evidence import RealImages
    from lora_trainer.evaluation.lora_check import open_lora, paired_losses
    from lora_trainer.run.encoding import encode_by_base

    inputs = fold.inputs
    samples = [inputs.validation[place] for place in fold.measured]
    plan = BucketPlan(tuple(inputs.validation_plan.views[place] for place in fold.measured))
    unseen = encode_by_base(fold.config, (inputs.family, inputs.facts), samples, plan, compute.device)
    images = RealImages((), unseen)
    opened = open_lora(fold.lora, inputs.facts.path, inputs.family, images, gate, compute)
    losses = None if isinstance(opened, LoraReport) else paired_losses(opened.studio, images)
    if losses is None or not all(bool(each.isfinite().all()) for each in losses):
        message = f"The LoRA of fold {fold.number} does not work, so nothing is measured: {fold.lora}"
        raise LoraRefused(Problem(message, "Train the run again with a lower learning rate."))
    return losses


def kept_folds(lora: Path, data_hash: str) -> dict[str, Any] | None:
    """What both folds of a run have given, for a file that it exported; None for another file or other data."""
    try:
        found: dict[str, Any] = read_json(lora.parent / FOLDER / FILE)
        fits = found["data_hash"] == data_hash and found["files"].get(lora.name) == sha256_file(lora)
        return found if fits else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def with_folds(report: LoraReport, kept: Mapping[str, Any]) -> LoraReport:
    """The report with `learned` as both folds have measured it; unchanged for a LoRA that does not work."""
    from lora_trainer.evaluation.lora_findings import part_findings
    from lora_trainer.evaluation.part_words import MORE_IMAGES
    from lora_trainer.evaluation.remedies import with_remedies

    if "works" not in report.parts or report.parts["works"].outcome() != "passed":
        return report
    learning = kept["learning"]
    part = VerdictPart("learned", Estimate(learning["mean"], learning["low"], learning["high"]))
    parts = {**report.parts, part.name: part}
    about = [each for each in part_findings(parts, report.gate, may_grow=False) if each.code == part.name]
    if part.outcome(report.gate) == "unresolved":
        about = [replace(each, fix=MORE_IMAGES) for each in about]
    counts = " and ".join(str(each["images"]) for each in learning["folds"])
    message = (
        f"`learned` was measured on two other LoRAs, not on this file: each was trained with these settings on one half"
        f" of the images, and measured on the other ({counts} images). It says whether these settings and images generalize."
    )
    earlier = {part.name, f"{part.name}_not_measured", BY_FOLDS}
    others = (each for each in report.findings if each.code not in earlier)
    findings = with_remedies([*others, *about], parts)
    numbers = {**report.numbers, "learning": learning}
    return replace(report, parts=parts, findings=(*findings, Finding(BY_FOLDS, "note", message)), numbers=numbers)


def recorded_parts(record: Mapping[str, Any]) -> dict[str, VerdictPart]:
    """The parts of the verdict in a run's record; none where it has none, or one of an earlier version."""
    recorded, parts = record.get("lora", {}).get("parts") or {}, {}
    for name, part in recorded.items():
        if not isinstance(part, dict):
            return {}
        own = [part[key] for key in ("own_value", "own_low", "own_high") if part.get(key) is not None]
        parts[name] = VerdictPart(name, Estimate(*own) if len(own) == 3 else None, part.get("reason", ""))
    return parts


def put_on_record(folder: Path, record: Mapping[str, Any], kept: Mapping[str, Any], say: Say) -> None:
    """Replace `learned` in the verdict of a run's record, and write its report again; nothing where it has no verdict."""
    lora, parts = record.get("lora", {}), recorded_parts(record)
    if not parts:
        return
    findings = tuple(Finding(**each) for each in lora["findings"])
    report = with_folds(LoraReport(lora["gate"], parts, findings, lora["numbers"]), kept)
    now = {name: value for name, value in report.to_json().items() if name not in ("cost", "encoder")}
    scores = {**record["scores"], "lora": report.score}
    write_json(folder / RECORD, {**record, "scores": scores, "outcome": report.outcome, "lora": {**lora, **now}})
    try:
        write_report(folder)
    except Exception as error:  # noqa: BLE001  the record is written, and what was measured is kept
        say(f"{REPORT} could not be written: {type(error).__name__}: {error}")
