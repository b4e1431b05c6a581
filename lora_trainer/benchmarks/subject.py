"""What a measurement is taken of: a run's own model and data, or a public architecture with random weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from rich.console import Console
from torch import Tensor, nn

from lora_trainer.benchmarks.measures import OWN, SMALL
from lora_trainer.benchmarks.random_weights import with_random_weights as random_module
from lora_trainer.config.options import suited
from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.randomness import position_key
from lora_trainer.data.buckets import Bucket, ResizeCrop
from lora_trainer.data.caches.entries import Store
from lora_trainer.data.images.images import load_rgb
from lora_trainer.data.images.render import render
from lora_trainer.data.loader import Batch, CachedData
from lora_trainer.data.sample import Sample
from lora_trainer.data.steps import Ref
from lora_trainer.data.views import View
from lora_trainer.diffusion.process import Prediction, Process, usual_process
from lora_trainer.models.compiled import why_not
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.family import Architecture, Caption, Family, ModelFacts
from lora_trainer.models.published import public_architecture
from lora_trainer.run.choices import Choices, asked_by_user, cap_memory, choose
from lora_trainer.run.flow import prepare
from lora_trainer.run.inputs import own_architecture, read_inputs, trained_resolution
from lora_trainer.run.order import Order
from lora_trainer.run.reading import reading
from lora_trainer.run.session import Session, open_session, with_generated_images
from lora_trainer.training.build import build_step_context
from lora_trainer.training.feed import Feed, make_feed
from lora_trainer.training.guidance import make_guidance_target
from lora_trainer.training.micro_batch import MicroBatch, make_copier, make_micro_batch
from lora_trainer.training.processes import Processes, join_processes
from lora_trainer.training.run import Run
from lora_trainer.training.state import OomFallback
from lora_trainer.training.torch_settings import set_hardware

if TYPE_CHECKING:
    from lora_trainer.config.layers import Resolved
    from lora_trainer.config.schema import Config
    from lora_trainer.models.quantization.store import Narrow
    from lora_trainer.training.run_group import Member
    from lora_trainer.training.step import StepContext

Encoded = tuple[Tensor, Mapping[str, Tensor]]  # latents [B, C, h, w] and conditioning
Encode = Callable[[int], list[Encoded]]  # reads and encodes the images and captions of a step

TINY_NEEDS_A_FAMILY = Problem(
    "tiny_not_possible",
    "--tiny makes a public architecture thinner, and this is a run's own model or the built-in base.",
    "Name a family alone: --set model.family=sdxl --tiny",
)

ENDLESS = 2**31  # steps
TINY = 8  # a thin model's sides are so much smaller


@dataclass(frozen=True)
class BenchSubject:
    """`job` is what the trainer's loop is given; `load_encode` loads the encoders, None where there are none."""

    name: str
    run: Run
    load_encode: Callable[[], Encode] | None
    choices: Choices
    family: Family
    architecture: Architecture
    said: tuple[str, ...] = ()  # what was decided when it was built

    @property
    def context(self) -> StepContext:
        return self.run.context

    @property
    def micros(self) -> Callable[[int], list[MicroBatch]]:
        """A step's number -> its micro-batches."""
        return self.run.feed.micros

    @property
    def precision(self) -> str:
        return self.choices.precision.value


def subject_of(
    resolved: Resolved,
    folder: Path,
    *,
    tiny: bool = False,
    named: str = OWN,
    shapes: int = 1,
    member: Member | None = None,
) -> BenchSubject:
    """What is measured: the small U-Net, or the public architecture when only a family is named, or the run's own model.

    An architecture alone will meet micro-batches of so many `shapes`. A `member` of a group of runs is on the group's base.

    Raises UserError.
    """
    config = resolved.config
    if (architecture := architecture_named(config, named)) is not None:
        is_thin = tiny and named != SMALL
        return public_subject(resolved, architecture, folder, tiny=is_thin, shapes=shapes, member=member)
    if tiny:
        raise UsageError(TINY_NEEDS_A_FAMILY)
    order = Order(resolved, folder, Console(stderr=True, soft_wrap=True), member=member)
    session, run = prepare(with_generated_images(open_session(order, read_inputs(config))), {})
    name, load = session.inputs.facts.name, partial(load_encode, session, run.feed)
    own = own_architecture(session.inputs)
    return BenchSubject(name, run, load, session.choices, session.inputs.family, own, run.context.built.notes)


def architecture_named(config: Config, named: str = OWN) -> str | None:
    """The public architecture that is measured; None for the run's own model."""
    return SMALL if named == SMALL else config.model.family if config.model.path is None else None


def subject_as_asked(
    resolved: Resolved, folder: Path, *, tiny: bool = False, named: str = OWN, shapes: int = 1
) -> BenchSubject:
    """As `subject_of`, where what is asked for is what is measured.

    Raises UsageError also where its blocks should be compiled and cannot be: a run continues without.
    """
    subject = subject_of(resolved, folder, tiny=tiny, named=named, shapes=shapes)
    context = subject.context
    if resolved.config.compile.enabled is True and context.compiled is None:
        reason = why_not(context.denoiser, context.device)
        raise UsageError(Problem("not_compiled", f"Not compiled: {reason}.", "Measure it where it can be, or without."))
    return subject


def load_encode(session: Session, feed: Feed) -> Encode:
    """The run's encoders as one function, to encode in every step as a script without caches does."""
    inputs, choices = session.inputs, session.choices
    encoders = inputs.family.load_encoders(inputs.facts.path, choices.dtype, choices.device)
    data, seed = feed.data, session.config.train.seed

    def pixels_of(ref: Ref) -> Tensor:
        sample, view = data.samples[ref.index], data.views[ref.index][data.turn(ref, seed)]
        return torch.from_numpy(render(load_rgb(sample.path, sample.span), view, sample.content))

    def text_of(ref: Ref, step: int) -> Caption:
        return data.caption(ref, step, step // feed.plan.steps_per_epoch, seed)

    def encode_group(group: Sequence[Ref], step: int) -> Encoded:
        pixels = torch.stack([pixels_of(ref) for ref in group])
        mean, spread = encoders.encode_image(pixels.permute(0, 3, 1, 2).float() / 127.5 - 1.0)
        cond = encoders.encode_text([text_of(ref, step) for ref in group])
        return mean + spread * torch.randn_like(spread), cond

    def encode(step: int) -> list[Encoded]:
        return [encode_group(group, step) for group in feed.groups(step)]

    return encode


def small_unet() -> Architecture:
    """A U-Net of 30 M weights, for machines on which no published model trains."""
    path = Path(__file__).with_name("small_unet.json")
    document = json.loads(path.read_text(encoding="utf-8"))
    return Architecture(ModelFacts(path=path, named=SMALL, **document["facts"]), document["denoiser"])


def public_built(
    resolved: Resolved, named: str, *, tiny: bool, shapes: int = 1, member: Member | None = None
) -> tuple[str, StepContext, Architecture, Choices]:
    """A public architecture with random weights: what it is called, itself, its form, the hardware's choices."""
    architecture = small_unet() if named == SMALL else public_architecture(named)
    resolved = suited(resolved, architecture.facts.prediction)
    config = resolved.config
    family = reading(config, FAMILIES[architecture.facts.family])
    if tiny:
        architecture = thinned(architecture)
    processes = join_processes()
    choices = choose(resolved, family, architecture, processes.device, 1)
    cap_memory(config, processes.device)
    set_hardware(config, processes.device)
    facts = architecture.facts
    side = trained_resolution(config, facts)
    latents = (choices.micro, facts.latent_channels, side // facts.downscale, side // facts.downscale)
    built, stored = with_random_weights(family, architecture), (named, str(choices.layout))
    context = build_step_context(
        config,
        built if member is None else member.sharing(built, stored),
        facts,
        replace(choices.layout, compiled=config.compile.enabled is True, shapes=shapes, latents=latents),
        Processes(0, 1, choices.device, None, lambda: None),
        is_attention_requested=asked_by_user(resolved, "hardware.attention_backend"),
    )
    if member is not None:
        context = member.join(context, stored, lambda line: None)
    called = "U-Net of 30 M weights" if named == SMALL else named
    name = f"{called}{f' at {family.denoiser.thinness}' if tiny else ''}, {side} px, random weights"
    return name, context, architecture, choices


def public_subject(
    resolved: Resolved,
    named: str,
    folder: Path,
    *,
    tiny: bool = False,
    shapes: int = 1,
    member: Member | None = None,
) -> BenchSubject:
    """A published denoiser with random weights and random inputs: no model, no data, no encoders."""
    name, context, architecture, choices = public_built(resolved, named, tiny=tiny, shapes=shapes, member=member)
    config = suited(resolved, architecture.facts.prediction).config
    family = reading(config, FAMILIES[architecture.facts.family])
    side, count = trained_resolution(config, architecture.facts), config.train.effective_batch_size
    cond_shapes = family.text.cond_shapes(architecture.denoiser)
    if (scale := config.loss.guidance_target) is not None:
        empty = {name: torch.zeros(shape) for name, shape in cond_shapes.items()}
        guidance = make_guidance_target(scale, context.denoiser, empty, context.device, context.dtype)
        context = guidance.applied_to(context)
    copied = make_copier(context.device, context.dtype)

    def micros(step: int) -> list[MicroBatch]:
        refs = [Ref(index, f"random-{index}", 0) for index in range(count)]
        groups = [refs[first : first + choices.micro] for first in range(0, len(refs), choices.micro)]
        batches = [random_batch(group, architecture, cond_shapes, (side, side), choices.dtype) for group in groups]
        return copied(
            [make_micro_batch(batch, step, config.train.seed, config.noise, context.process) for batch in batches]
        )

    data = CachedData(
        samples=[Sample(Path(f"random-{index}"), "", side, side, f"random-{index}") for index in range(count)],
        views=[(View(ResizeCrop(side, side, 0, 0, Bucket(side, side))),)] * count,
        latent_keys=(),
        text_keys=(),
        empty_key="",
        latents=Store(folder, "latents"),
        texts=Store(folder, "texts"),
    )
    run = Run(
        config=config,
        folder=folder,
        context=context,
        feed=replace(make_feed(config, data, context, join_processes(), choices.micro, ENDLESS), micros=micros),
        processes=join_processes(),
        planned=OomFallback(choices.micro, context.built.checkpointed, swapped=context.built.swapped),
        total_steps=ENDLESS,
        validate=None,
        sample=None,
        settings={},
        say=lambda line: None,
    )
    return BenchSubject(name, run, None, choices, family, architecture, context.built.notes)


def with_random_weights(family: Family, architecture: Architecture) -> Family:
    """The family, its denoiser and noise schedule taken from the architecture in place of a folder."""

    def load_denoiser(
        folder: Path, dtype: torch.dtype, device: torch.device, narrow: Narrow | None = None
    ) -> nn.Module:
        return random_module(lambda: family.denoiser.make(architecture.denoiser), dtype, device, narrow)

    def make_process(folder: Path) -> Process:
        return usual_process(cast("Prediction", architecture.facts.prediction))

    return replace(family, denoiser=replace(family.denoiser, load=load_denoiser, make_process=make_process))


def random_batch(
    refs: Sequence[Ref],
    architecture: Architecture,
    shapes: Mapping[str, tuple[int, ...]],
    sides: Sequence[int],
    dtype: torch.dtype,
) -> Batch:
    """A batch as the cache would give it: the same for the same samples, however they are split."""
    facts = architecture.facts
    generators = [torch.Generator().manual_seed(position_key(0, "bench", ref.id) % 2**32) for ref in refs]
    shape = (facts.latent_channels, *(side // facts.downscale for side in sides))
    row = [float(value) for value in (*sides, 0, 0, *sides)]

    def drawn(shape: Sequence[int]) -> Tensor:
        return torch.stack([torch.randn(*shape, generator=generator) for generator in generators])

    return Batch(
        refs=tuple(refs),
        mean=drawn(shape),
        spread=torch.full((len(refs), *shape), 0.1),
        cond={name: drawn(each).to(dtype) for name, each in shapes.items()},
        sizes=torch.tensor([row] * len(refs)),
        weights=torch.ones(len(refs)),
    )


def thinned(architecture: Architecture) -> Architecture:
    """The same kinds of blocks, narrow and few, for small images: for machines without a GPU."""
    facts = architecture.facts
    side = max(facts.pixel_step, facts.resolution // TINY // facts.pixel_step * facts.pixel_step)
    thin = FAMILIES[facts.family].denoiser.thin(architecture.denoiser)
    return Architecture(replace(facts, resolution=side), thin)
