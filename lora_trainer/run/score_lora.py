"""Score a LoRA file with the LoRA gate: what `validate` and `validate_lora` do, without printing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from lora_trainer.core.errors import DatasetRefused, Problem, UsageError
from lora_trainer.core.findings import counted
from lora_trainer.core.tensorfile import METADATA, read_tensor_header
from lora_trainer.data.manifest import read_manifest
from lora_trainer.data.views import BucketPlan, plan_plain
from lora_trainer.evaluation.remedies import with_remedies
from lora_trainer.run.bases.encoder import find_encoder
from lora_trainer.run.bases.find import describe_model, is_builtin
from lora_trainer.run.counting import JUDGED, counting
from lora_trainer.run.inputs import data_in_use, measured_among, read_inputs, read_model, trained_framings
from lora_trainer.run.reading import RunFolder, read_as_trained, run_beside
from lora_trainer.run.sampling import triggers_of

if TYPE_CHECKING:
    from pathlib import Path

    from lora_trainer.config.schema import Config
    from lora_trainer.data.sample import Sample
    from lora_trainer.evaluation.lora_report import LoraReport
    from lora_trainer.models.vision_encoder import EncoderFolder

Say = Callable[[str], None]
DRAWN = "samples/validate"  # in a run's: images of the last `validate`


@dataclass(frozen=True)
class Samples:
    """The dataset's images, their buckets, the contents of those that were not trained on, and where they come from."""

    samples: tuple[Sample, ...]
    plan: BucketPlan
    unseen: frozenset[str]
    origin: str


NO_PLAN = BucketPlan(())


@data_in_use()
def score_lora(path: Path, data: Path | None, config: Config, say: Say) -> LoraReport:
    """Score a LoRA file.

    `data` names its training images. Without it, those of the run whose `run.json` is beside the file are used. A run's
    validation images count as not trained on while the data is unchanged. Without a run, and with the built-in base
    model, the built-in dataset is used. `say` takes lines about what is measured. Raises UsageError for a file, model
    or folder that cannot be read.
    """
    if path.is_dir():
        inside = ", ".join(sorted(file.name for file in path.glob("*.safetensors"))) or "none"
        raise UsageError(
            Problem("path_is_folder", f"{path} is a folder, not a LoRA file.", f"LoRA files in it: {inside}.")
        )
    if not path.is_file():
        raise UsageError(Problem("file_missing", f"There is no LoRA file {path}.", "Check the path."))
    header = read_tensor_header(path).get(METADATA, {})  # refuse what is not a LoRA before a model is needed
    run = run_beside(path)
    config = read_as_trained(config, None if run is None else run.config, header)
    encoder = find_encoder(config, say=say)
    say(f"base model: {describe_model(config.model)}")
    samples = _samples_of_folder(config, data, run, say) if data is not None else _samples_of_run(config, run)
    say(samples.origin)
    measured = measured_of(samples)
    if len(measured.samples) < len(samples.samples):
        say(f"measured with {counted(len(measured.samples), 'image')} of them, each content once")
    trigger = next(iter(triggers_of(config, header)), "")
    report = _evaluate(path, config, measured, (encoder, None if run is None else run.config, trigger), say)
    if run is not None and run.unseen is not None:
        report = replace(report, findings=with_remedies([*report.findings, run.unseen], report.parts))
    return report


def _evaluate(
    path: Path, config: Config, measured: Samples, known: tuple[EncoderFolder | None, Config | None, str], say: Say
) -> LoraReport:
    """The report on a LoRA file; `known` are the outside encoder and the settings of its run, each None without one, and its
    trigger word."""
    encoder, trained, trigger = known
    import torch

    from lora_trainer.evaluation.compute import Compute
    from lora_trainer.evaluation.evidence import RealImages
    from lora_trainer.evaluation.lora_check import LORA_CHECKS, LoraGate, check_lora, refused_unloaded
    from lora_trainer.evaluation.placing import with_less
    from lora_trainer.evaluation.seeing import load_encoder
    from lora_trainer.models.lora_names import read_adapter_with_tokens
    from lora_trainer.run.caching import cache_folder, is_mirrored
    from lora_trainer.run.choices import evaluated_on, usable_bytes
    from lora_trainer.run.encoding import encode_by_base
    from lora_trainer.run.round_trip import kept_decibels
    from lora_trainer.run.verdict_images import keep_images, write_images

    family, facts = read_model(config)
    if report := refused_unloaded(read_adapter_with_tokens(path), facts.path, family, config.gates.lora):
        return report
    device, dtype = evaluated_on(config)
    if encoder is not None:  # refused before anything is encoded
        load_encoder(encoder.path, torch.device("cpu"))

    try:
        encoded = encode_by_base(config, (family, facts), measured.samples, measured.plan, device)
    except DatasetRefused as refused:
        raise UsageError(refused.problems) from refused
    trained_on = sum(sample.content not in measured.unseen for sample in measured.samples)
    decibels = kept_decibels(facts, measured.samples, measured.plan.views)
    images = RealImages(encoded[:trained_on], encoded[trained_on:], decibels, is_mirrored(trained or config))
    check = config.gates.lora_check
    effort = check if check in LORA_CHECKS else "full"  # the command was requested, so "off" measures too
    gate = LoraGate(config.gates.lora, effort, encoder=encoder, cache=cache_folder(config), trigger=trigger)

    def evaluate(compute: Compute) -> LoraReport:
        with counting() as count:
            return check_lora(path, facts.path, family, images, gate, replace(compute, progress=count(JUDGED)))

    compute = Compute(dtype, device, usable_bytes(config, device), say=say)
    report = with_less(evaluate, compute)
    if trained is not None:  # the folder is a run's: what was measured can be looked at
        own_images = {each.id: (each, own[0]) for each, own in zip(measured.samples, measured.plan.views, strict=True)}
        write = partial(write_images, (path.parent, DRAWN), facts, own_images, report.shown)
        if keep_images(path.parent / DRAWN, report.shown, write, compute, say):
            say(f"samples to look at: {path.parent / DRAWN}")
    if config.gates.compare == "off" or report.parts["works"].outcome() != "passed":
        return report
    from lora_trainer.run.compare_loras import compare_file

    return replace(report, choice=compare_file(path, trained, config, (family, facts, images, gate), compute))


def measured_of(found: Samples) -> Samples:
    """The samples that a run would measure with (`measured_among`): trained ones first, then those not trained on."""
    numbered = [*enumerate(found.samples)]
    train = [index for index, sample in numbered if sample.content not in found.unseen]
    unseen = [index for index, sample in numbered if sample.content in found.unseen]
    places = (*train, *unseen)
    measured = measured_among([found.samples[each] for each in train], [found.samples[each] for each in unseen])
    chosen = [places[index] for index in measured]
    plan = BucketPlan(tuple(found.plan.views[index] for index in chosen))
    return replace(found, samples=tuple(found.samples[index] for index in chosen), plan=plan)


def _samples_of_folder(config: Config, data: Path, run: RunFolder | None, say: Say) -> Samples:
    """The images of a folder, which count as trained on, except for those that the file's run kept for validation."""
    _, facts = read_model(config)
    manifest, findings = read_manifest([data], allow_missing_captions=True)
    for finding in findings:
        if finding.severity == "error":
            say(f"skipped: {finding.path} {finding.message}")
    samples = tuple(sample for sample in manifest.samples if not sample.regularization)
    plan = plan_plain(samples, trained_framings(config, facts)[:1])
    unseen = frozenset(sample.content for sample in samples) & _kept_by(run)
    origin = f"compared with {counted(len(samples), 'image')} from {data}"
    if run is not None:
        origin += (
            f", of which the run of this file trained on {len(samples) - len(unseen)}" if unseen else ", trained on"
        )
    return Samples(samples, plan, unseen, origin)


def _kept_by(run: RunFolder | None) -> frozenset[str]:
    """Contents of a run's validation images, from its data as it is now; none if that cannot be read or has changed."""
    if run is None:
        return frozenset()
    try:
        inputs = read_inputs(run.config)
    except (UsageError, DatasetRefused):
        return frozenset()
    if inputs.manifest.data_hash != run.data_hash:
        return frozenset()
    return frozenset(sample.content for sample in inputs.validation)


def _samples_of_run(config: Config, run: RunFolder | None) -> Samples:
    """The run's images; without a run those of the built-in dataset, for the built-in base model."""
    if run is None and not is_builtin(config.model):
        return Samples((), NO_PLAN, frozenset(), "no --data and no run.json beside the file: no images to compare with")
    sections = {name: getattr(config, name) for name in ("model", "text_encoder", "textual_inversion")}
    trained_with = config if run is None else run.config.model_copy(update=sections)
    try:
        inputs = read_inputs(trained_with)
    except UsageError as error:
        return Samples((), NO_PLAN, frozenset(), f"no images to compare with: {error}")
    samples = (*inputs.train, *inputs.validation)
    plan = BucketPlan((*inputs.train_plan.views, *inputs.validation_plan.views))
    learned = [index for index, sample in enumerate(samples) if not sample.regularization]
    samples, plan = tuple(samples[i] for i in learned), BucketPlan(tuple(plan.views[i] for i in learned))
    if run is not None and inputs.manifest.data_hash != run.data_hash:
        message = f"the run's data has changed since: its {counted(len(samples), 'image')} may have been trained on"
        return Samples(samples, plan, frozenset(), f"{message}; name others with --data")
    unseen = frozenset(sample.content for sample in inputs.validation)
    origin = f"compared with {counted(len(samples), 'image')} of {'the built-in dataset' if run is None else 'its run'}"
    origin += f", {len(unseen)} of them not trained on"
    return Samples(samples, plan, unseen, origin)
