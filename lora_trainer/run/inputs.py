"""Reads and checks the model and data of a run before anything heavy is loaded. No torch."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from lora_trainer.builtin import BASE_FOLDER, DATA_FOLDER
from lora_trainer.config.paths import with_paths
from lora_trainer.config.schema import CaptionsSection, Config, SourceSection
from lora_trainer.core.errors import Problem, UsageError, gathering, known_as
from lora_trainer.core.families import families
from lora_trainer.core.findings import Finding, counted
from lora_trainer.core.io import user_cache_folder
from lora_trainer.data.caches.sharing import in_use
from lora_trainer.data.captions import canonical, settled
from lora_trainer.data.images.remote import is_url
from lora_trainer.data.manifest import read_manifest
from lora_trainer.data.split import MOST_COMPARED, split_validation
from lora_trainer.data.steps import LargestStep, Lengths, StepArithmetic, largest_step, step_arithmetic
from lora_trainer.data.views import BucketPlan, Framing, View, framings_of, notes_on, plan_plain, plan_views
from lora_trainer.dataset_check import DataReport, DatasetGate, check_buckets, check_dataset, check_plan
from lora_trainer.dataset_check.doubts import CaptionAgreement
from lora_trainer.models.detection import detect_family
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.family import USUAL_FAMILY, Architecture, Family, ModelFacts
from lora_trainer.models.folder import read_config, without_weights
from lora_trainer.models.single.tokenizers import clip_words, count_clip_tokens
from lora_trainer.run.bases.find import describe_model, find_base, on_stderr
from lora_trainer.run.bases.names import absolute
from lora_trainer.run.class_images import planned_class_images
from lora_trainer.run.counting import counting
from lora_trainer.run.reading import reading, refuse_lacking

if TYPE_CHECKING:
    from lora_trainer.config.schema.types import PathKind
    from lora_trainer.data.buckets import Bucket
    from lora_trainer.data.sample import Manifest, Sample

NAMES_SHOWN = 4  # of validation images
Examine = Callable[[DataReport], Sequence[Finding]]  # of `read_data`
LATENT_BYTES: Mapping[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2}  # of each number of the cached latents


@dataclass(frozen=True)
class Inputs:
    """The inputs of a run. `train_plan` and `validation_plan` are in the order of their samples.

    `resolution` is the largest that is trained. Captions of `manifest` and `report` are as
    written, those of `train` and `validation` canonical; `train` has all trained texts too.
    Class images are only in `train`, last: planned ones until `run/generation.py` has generated or found them.
    """

    family: Family
    facts: ModelFacts
    resolution: int
    manifest: Manifest
    report: DataReport
    train: tuple[Sample, ...]
    validation: tuple[Sample, ...]
    train_plan: BucketPlan
    validation_plan: BucketPlan

    @property
    def split_line(self) -> str:
        """For people: `images: 22 training, 2 validation (a.png, b.png)`."""
        line = f"images: {len(self.train)} training, {len(self.validation)} validation"
        if not self.validation:
            return f"{line} (--set validation.split=0.1 keeps some and measures on them)"
        names = [sample.path.name for sample in self.validation]
        shown = ", ".join(names[:NAMES_SHOWN]) + (", …" if len(names) > NAMES_SHOWN else "")
        return f"{line} ({shown})"


def data_sources(config: Config) -> list[SourceSection]:
    """The data's folders and files; the built-in set when none is named."""
    return list(config.data.sources) or [SourceSection(path=str(DATA_FOLDER))]


@contextlib.contextmanager
def data_in_use() -> Iterator[None]:
    """What is unpacked of the data in the user's cache folder stays there meanwhile: samples' spans lie in it."""
    with in_use(user_cache_folder()):
        yield


def named_controls(config: Config) -> int:
    """How many control images the settings name for each image."""
    return max((len(each.control_images) + len(each.control_columns) for each in config.data.sources), default=0)


@data_in_use()
def list_data(config: Config, *, allow_missing_captions: bool | None = None) -> tuple[Manifest, tuple[Finding, ...]]:
    """The samples of the sources, with findings. Raises UsageError for bad sources."""
    allowed = config.data.allow_missing_captions if allow_missing_captions is None else allow_missing_captions
    with counting() as count:
        watch = count("headers read")
        return read_manifest(
            data_sources(config), allow_missing_captions=allowed, captions=config.captions, progress=watch
        )


def caption_rules(config: Config) -> tuple[CaptionsSection, ...]:
    """How captions are changed, for each of the data's sources, then for class images."""
    own = tuple(source.captions or config.captions for source in config.data.sources) or (config.captions,)
    # Class images are trained with the very prompts that they were generated from.
    return (*own, CaptionsSection()) if config.data.num_class_images else own


def with_absolute_paths(config: Config) -> Config:
    """The same config, good from any folder. Ids of a hub and addresses stay."""

    def absolute_path(kind: PathKind, text: str) -> str:
        if is_url(text):
            return text
        return absolute(text) if kind.has_hub else str(Path(text).expanduser().resolve())

    return with_paths(config, absolute_path)


def read_model(
    config: Config,
    families: Mapping[str, Family] = FAMILIES,
    *,
    weights: bool = True,
    say: Callable[[str], None] = on_stderr,
    suits: Callable[[str], object] = lambda prediction: None,
) -> tuple[Family, ModelFacts]:
    """The model's family, with the settings' text options, and its facts.

    Raises UsageError, all problems at once, for a model that cannot be trained with the settings; `suits` is called with
    its prediction type, and may raise its own.

    Without `weights` only the configs of a hub's model are downloaded and read.
    """
    if config.model.path is None and config.model.family not in (None, USUAL_FAMILY):
        message = f"model.family={config.model.family} needs --model: the built-in model is {USUAL_FAMILY}."
        raise UsageError(Problem("model_needed", message, "Set --model to the model's folder."))
    base = find_base(config.model, offline=config.run.offline, weights=weights, say=say)
    problems: list[Problem] = []
    with known_as(base.places):
        family = plain = families[config.model.family or detect_family(base.folder)]
        with gathering(problems):
            family = reading(config, plain)
        with gathering(problems):
            refuse_lacking(family.text_rates(config.text_encoder.learning_rates), base)
    with known_as(base.places), contextlib.nullcontext() if base.whole else without_weights():
        facts = _described((family, plain), base.folder, problems)
    if config.textual_inversion.placeholder_tokens and base.whole:
        from lora_trainer.models.textual_inversion import (
            check_learned_tokens,  # loads torch, which most settings need not here
        )

        with gathering(problems):
            check_learned_tokens(base.folder, family.text.clips, config.textual_inversion)
    if facts is None:
        raise UsageError(problems)
    with gathering(problems):
        suits(facts.prediction)
    if config.sample.negative_prompt and not family.pipeline.sampling_defaults(base.folder).negative:
        model = f"{describe_model(config.model)} is sampled without classifier-free guidance"
        message = f"sample.negative_prompt is {config.sample.negative_prompt!r}, but {model}."
        problems.append(Problem("negative_prompt_unused", message, "Leave the negative prompt empty with this model."))
    if problems:
        raise UsageError(problems)
    shown = {name: getattr(base, name) for name in ("named", "whole", "form", "title", "prediction_by")}
    return family, replace(facts, **shown)


def _described(families: Sequence[Family], folder: Path, problems: list[Problem]) -> ModelFacts | None:
    """By the first of them that takes the folder: the plain one does where options of the other are refused."""
    for family in families:
        with gathering(problems):
            return family.describe(folder)
    return None


def own_architecture(inputs: Inputs) -> Architecture:
    """The architecture of a run's model, from its folder."""
    return read_architecture(inputs.family, inputs.facts)


def read_architecture(family: Family, facts: ModelFacts) -> Architecture:
    """The architecture of the model in `facts.path`. Raises UsageError when its config cannot be read."""
    return Architecture(facts, read_config(facts.path, f"{family.denoiser.component}/config.json"))


def trained_framings(config: Config, facts: ModelFacts) -> tuple[Framing, ...]:
    """How each source's images are cropped and resized; by default at the model's resolution, up to the preset's.

    Class images, which come last, are cropped and resized as the source with the largest resolution.

    Raises UsageError, all problems at once, for sides that no bucket can have.
    """
    ceiling = config.data.resolution_ceiling
    own = facts.resolution if ceiling is None else min(facts.resolution, ceiling)
    framings = framings_of(config.data, own, facts.pixel_step)
    if not config.data.num_class_images:
        return framings
    return (*framings, max(framings, key=lambda framing: framing.resolutions[0]))


def class_image_side(config: Config, facts: ModelFacts) -> int:
    """Width and height of class images in pixels: the largest resolution that the model can generate, up to the trained one."""
    return max(facts.pixel_step, trained_resolution(config, facts) // facts.pixel_step * facts.pixel_step)


def trained_resolution(config: Config, facts: ModelFacts) -> int:
    """The largest that any source is trained at. Raises UsageError as `trained_framings`."""
    return largest_resolution(trained_framings(config, facts))


def largest_resolution(framings: Sequence[Framing]) -> int:
    return max(framing.resolutions[0] for framing in framings)


@data_in_use()
def read_data(
    config: Config,
    facts: ModelFacts,
    *,
    decode: bool = True,
    examine: Examine = lambda report: (),
) -> tuple[Manifest, DataReport]:
    """Read and check the data as this config would train it on that model; without `decode` from headers alone.

    `examine` takes the report and returns what else is found; the score then depends on that, too. Raises UsageError for
    bad sources.
    """
    framings, text = trained_framings(config, facts), FAMILIES[facts.family].text
    manifest, findings = list_data(config)
    refuse_controls(facts, max((len(sample.controls) for sample in manifest.samples), default=0))
    if len({len(sample.controls) for sample in manifest.samples if not sample.regularization}) > 1:
        message = "Some sources have control images and others have fewer: a step would mix them."
        raise UsageError(
            Problem("control_images_differ", message, "Give every source equally many, or train them apart.")
        )
    manifest = replace(manifest, notes=(*manifest.notes, *notes_on(framings)))
    gate = DatasetGate(
        framings,
        config.data.allow_small_images,
        facts.caption_tokens,
        caption_rules(config),
        config.textual_inversion.placeholder_tokens,
        config.textual_inversion.num_vectors,
        config.gates.dataset,
        clip_words(),
        # CLIP knows hardly any word outside of Latin script; larger text encoders beside it know more.
        count_clip_tokens if text.clips and not text.cached else None,
    )
    with counting() as count:
        report = check_dataset(manifest, findings, gate, decode=decode, progress=count("images decoded"))
    if found := examine(report):
        report = check_dataset(manifest, (*findings, *found), gate, decode=decode)
    return manifest, replace(report, general=(*report.general, *_plan_findings(config, facts, report)))


def refuse_controls(facts: ModelFacts, controls: int) -> None:
    """Raise UsageError for more control images of a sample than the model reads."""
    if controls > facts.most_controls:
        takes = (
            f"takes {counted(facts.most_controls, 'control image')}"
            if facts.most_controls
            else "takes no control images"
        )
        model = "the built-in base model" if facts.path == BASE_FOLDER else facts.name
        message = f"There {'is' if controls == 1 else 'are'} {counted(controls, 'control image')} for each image, and {model} {takes}."
        fix = "Name fewer with control_images and control_columns."
        if not facts.most_controls:
            editing = [families()[name]["title"] for name, family in FAMILIES.items() if family.pipeline.edits_images]
            fix = f"Name an edit model of {', '.join(editing)} with --model, or remove control_images and control_columns."
        raise UsageError(Problem("control_images_differ", message, fix))


def check_control_images(files: Sequence[str], prompts: int, facts: ModelFacts) -> None:
    """Raise UsageError for control images of so many prompts that are missing, do not share out evenly, or are more for a
    prompt than the model reads. One file serves all prompts."""
    if not files:
        return
    if missing := [file for file in files if not Path(file).expanduser().is_file()]:
        raise UsageError(
            Problem("control_image_missing", f"There is no control image {missing[0]}.", "Check sample.control_images.")
        )
    if not prompts or (len(files) > 1 and len(files) % prompts):
        message = f"There are {counted(len(files), 'control image')} for {counted(prompts, 'prompt')}."
        raise UsageError(
            Problem("control_images_differ", message, "Name equally many for each prompt, or one for all.")
        )
    refuse_controls(facts, max(1, len(files) // prompts))


def validation_split(
    config: Config, facts: ModelFacts, report: DataReport
) -> tuple[tuple[Sample, ...], tuple[Sample, ...]]:
    """(train, validation); images that look the same stay on one side. Planned class images are trained."""
    kept = config.validation
    train, validation = split_validation(report.samples, kept.split, kept.split_seed, report.kin)
    return (*train, *planned_class_images(config, class_image_side(config, facts))), validation


def _plan_findings(config: Config, facts: ModelFacts, report: DataReport) -> list[Finding]:
    """Whether the steps, the rank and the buckets suit so many images."""
    train = validation_split(config, facts, report)[0]
    learned = {sample.content for sample in train if not sample.regularization}
    if not learned:
        return []
    micro = config.train.max_micro_batch_size or config.train.effective_batch_size
    steps = arithmetic(config, train, micro, processes=1)
    found = check_plan(len(learned), steps.exposures(len(learned)), config.lora.rank)
    return found + check_buckets([row.samples for row in report.rows], micro)


def read_inputs(
    config: Config, model: tuple[Family, ModelFacts] | None = None, examine: Examine = lambda report: ()
) -> Inputs:
    """Read model facts and data, decode every image, check the dataset and split it.

    `model` is what `read_model` returned, which is called where it is None; `examine` is that of `read_data`. Raises UsageError for a model or folder that
    cannot be read. Problems of single images are in `report`, which the caller compares with the gate.
    """
    family, facts = model or read_model(config)
    manifest, report = read_data(config, facts, examine=examine)
    check_control_images(config.sample.control_images, len(set(config.sample.prompts)), facts)
    framings, rules = trained_framings(config, facts), caption_rules(config)
    train, validation = validation_split(config, facts, report)
    train_plan, validation_plan = plan_views(train, framings), plan_plain(validation, framings)
    refuse_large(facts, (*train_plan.counts, *validation_plan.counts))
    return Inputs(
        family=family,
        facts=facts,
        resolution=largest_resolution(framings),
        manifest=manifest,
        report=report,
        train=settled(train, rules),
        validation=tuple(map(canonical, settled(validation, rules))),
        train_plan=train_plan,
        validation_plan=validation_plan,
    )


def refuse_large(facts: ModelFacts, buckets: Sequence[Bucket]) -> None:
    """Raise UsageError for buckets that are wider or higher than the model's position embeddings."""
    most, side = facts.largest_side, max((max(each.width, each.height) for each in buckets), default=0)
    if most is not None and side > most:
        message = f"A bucket is {side} px on its longer side, but {facts.name} supports at most {most} px."
        raise UsageError(
            Problem(
                "resolution_too_large",
                message,
                f"Set data.bucket_max={most}, or data.resolution or data.max_aspect lower.",
            )
        )


def dataset_facts(inputs: Inputs) -> dict[str, Any]:
    """What a run's record keeps of its data: score's parts, counts, buckets, and every finding with its file."""
    buckets = Counter(inputs.train_plan.counts) + Counter(inputs.validation_plan.counts)
    agreement = inputs.report.agreement
    doubts = [replace(each, path=each.path.resolve()) for each in agreement.doubts]
    kept = replace(agreement, doubts=doubts)
    return {
        "parts": inputs.report.parts,
        "caption_agreement": TypeAdapter(CaptionAgreement).dump_python(kept, mode="json"),
        "samples": len(inputs.report.samples),
        "validation": len(inputs.validation),
        "resolution": inputs.resolution,
        "buckets": {str(bucket): count for bucket, count in sorted(buckets.items())},
        "findings": [
            {**finding.to_json(), "path": str(finding.path.resolve()) if finding.path else None}
            for finding in inputs.report.findings
        ],
        "notes": list(inputs.report.notes),
    }


def captioned_samples(
    config: Config,
    facts: ModelFacts,
    train: Sequence[Sample],
    validation: Sequence[Sample],
    views: Sequence[Sequence[View]],
) -> tuple[tuple[Sample, ...], tuple[tuple[View, ...], ...]]:
    """The trained samples with all their texts, then the measured ones with their canonical captions; and, where the text
    encoder reads control images, the views that their captions are read in. `views` are those of both, trained ones first.

    In the latter case the empty caption is one more text, the last, of a trained sample with control images whose
    captions may be dropped.
    """
    samples, chosen = (*train, *validation), measured_among(train, validation)
    plain = tuple(canonical(samples[index]) for index in chosen)
    if not facts.control_tokens:
        return (*train, *plain), ((),) * (len(train) + len(plain))
    rules = caption_rules(config)
    trained = (
        replace(sample, variants=(*sample.texts, ""))
        if sample.controls and rules[sample.source].drops_captions
        else sample
        for sample in train
    )
    return (*trained, *plain), (*map(tuple, views[: len(train)]), *(tuple(views[index][:1]) for index in chosen))


def measured_among(train: Sequence[Sample], validation: Sequence[Sample]) -> list[int]:
    """Indices of the samples that the LoRA is compared with: some trained ones, by content, then the validation ones.

    Of samples of the same content the first: a copy would be the nearest other image. Regularization images are none of
    them.
    """
    learned: dict[str, int] = {}
    unseen: dict[str, int] = {}
    for first, samples, found in ((0, train, learned), (len(train), validation, unseen)):
        for index, sample in enumerate(samples, first):
            if not sample.regularization:
                found.setdefault(sample.content, index)
    kept = list(unseen.values())[:MOST_COMPARED]
    return [*sorted(learned[content] for content in sorted(learned)[: MOST_COMPARED - len(kept)]), *kept]


def largest_of(config: Config, train: Sequence[Sample], plan: BucketPlan, processes: int) -> LargestStep:
    """How large a step of one process can be, and a micro-batch in it. `plan` is that of the samples."""
    buckets = [{view.fit.bucket for view in views} for views in plan.views]
    return largest_step(train, buckets, config.train.effective_batch_size, processes)


def latent_bytes(samples: Sequence[Sample], plan: BucketPlan, facts: ModelFacts, itemsize: int) -> int:
    """Bytes of all variants' latents with their masks, each once. `plan` is in the samples' order."""
    distinct = {
        (sample.content, sample.mask, sample.controls, view): (sample, view)
        for sample, views in zip(samples, plan.views, strict=True)
        for view in views
    }
    return sum(view_bytes(sample, view, facts, itemsize) for sample, view in distinct.values())


def view_bytes(sample: Sample, view: View, facts: ModelFacts, itemsize: int) -> int:
    """Bytes of one variant's latents: mean, std, mask and control images, each number of `itemsize` bytes."""
    places = view.fit.bucket.width * view.fit.bucket.height // facts.downscale**2
    channels = facts.latent_channels * (2 + len(sample.controls))
    return itemsize * places * (channels + (sample.mask is not None))


def arithmetic(config: Config, train: tuple[Sample, ...], max_micro: int, processes: int) -> StepArithmetic:
    """How many steps come of how many images."""
    length = config.train
    lengths = Lengths(length.max_steps, length.max_epochs, length.total_repeats, length.step_ceiling)
    return step_arithmetic(train, config.train.effective_batch_size, lengths, max_micro=max_micro, processes=processes)
