"""The model that is measured: a run's own with its data, or a public architecture with random weights and inputs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from rich.console import Console
from torch import Tensor, nn

from lora_trainer.benchmarks.measures import OWN, SMALL
from lora_trainer.benchmarks.random_weights import with_random_weights
from lora_trainer.config.options import suited
from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.data.buckets import Bucket, ResizeCrop
from lora_trainer.data.caches.entries import Store, write_entries
from lora_trainer.data.images.images import load_rgb
from lora_trainer.data.images.render import render
from lora_trainer.data.loader import CachedData
from lora_trainer.data.sample import Sample
from lora_trainer.data.views import View
from lora_trainer.diffusion.process import Prediction, Process, usual_process
from lora_trainer.models.compiled import why_not
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.family import Architecture, Family, ModelFacts
from lora_trainer.models.published import public_architecture
from lora_trainer.run.choices import Choices, asked_by_user, cap_memory, choose
from lora_trainer.run.inputs import own_architecture, read_inputs, trained_resolution
from lora_trainer.run.order import Order
from lora_trainer.run.prepare import prepare
from lora_trainer.run.reading import reading
from lora_trainer.run.session import Session, open_session, with_generated_images
from lora_trainer.training.build import build_step_context
from lora_trainer.training.feed import Feed, make_feed
from lora_trainer.training.objectives.guidance import make_guidance_target
from lora_trainer.training.processes import Processes, join_processes
from lora_trainer.training.state import OomFallback
from lora_trainer.training.torch_settings import set_hardware
from lora_trainer.training.training_run import Run

if TYPE_CHECKING:
    from lora_trainer.config.layers import Resolved
    from lora_trainer.config.schema import Config
    from lora_trainer.data.steps import Ref
    from lora_trainer.models.quantization.store import Narrow
    from lora_trainer.training.micro_batch import MicroBatch
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
RANDOM_SAMPLES = 8
TINY = 8  # a thin model's sides are so much smaller


@dataclass(frozen=True)
class BenchModel:
    """`resolved` are the requested settings, `run` is what the trainer's loop takes.

    A public architecture has no `session`: neither data nor encoders.
    """

    name: str
    resolved: Resolved
    run: Run
    choices: Choices
    family: Family
    architecture: Architecture
    session: Session | None = None

    @property
    def context(self) -> StepContext:
        return self.run.context

    @property
    def device(self) -> torch.device:
        return self.run.context.device

    @property
    def precision(self) -> str:
        return self.choices.precision.value

    def micros(self, step: int) -> list[MicroBatch]:
        """The micro-batches of the step of that number."""
        return self.run.feed.micros(step)

    def load_encoders(self) -> Encode | None:
        return None if self.session is None else load_encoders(self.session, self.run.feed)


def build_bench_model(
    resolved: Resolved,
    folder: Path,
    *,
    tiny: bool = False,
    subject: str = OWN,
    shapes: int = 1,
    member: Member | None = None,
) -> BenchModel:
    """The small U-Net, or the public architecture where only a family is named, or the run's own model.

    An architecture alone will meet micro-batches of so many `shapes`. A `member` of a group of runs is on the group's base.

    Raises UserError.
    """
    name = public_name(resolved.config, subject)
    if name is not None:
        return public_model(resolved, name, folder, tiny=tiny, shapes=shapes, member=member)
    if tiny:
        raise UsageError(TINY_NEEDS_A_FAMILY)
    order = Order(resolved, folder, Console(stderr=True, soft_wrap=True), member=member)
    session, run = prepare(with_generated_images(open_session(order, read_inputs(resolved.config))), {})
    inputs = session.inputs
    architecture = own_architecture(inputs)
    return BenchModel(inputs.facts.name, resolved, run, session.choices, inputs.family, architecture, session)


def public_name(config: Config, subject: str = OWN) -> str | None:
    """The public architecture that is measured; None for the run's own model."""
    if subject == SMALL:
        return SMALL
    return config.model.family if config.model.path is None else None


def refuse_uncompiled(model: BenchModel) -> None:
    """Raise UsageError where the blocks should be compiled and cannot be: a run continues without."""
    context = model.context
    if model.resolved.config.compile.enabled is True and context.compiled is None:
        reason = why_not(context.denoiser, context.device)
        raise UsageError(Problem("not_compiled", f"Not compiled: {reason}.", "Measure it where it can be, or without."))


def load_encoders(session: Session, feed: Feed) -> Encode:
    """The run's encoders as one function, to encode in every step as a script without caches does."""
    inputs, choices = session.inputs, session.choices
    encoders = inputs.family.load_encoders(inputs.facts.path, choices.dtype, choices.device)
    data, seed = feed.data, session.config.train.seed

    def read_pixels(ref: Ref) -> Tensor:
        sample, view = data.samples[ref.index], data.views[ref.index][data.turn(ref, seed)]
        return torch.from_numpy(render(load_rgb(sample.path, sample.span), view, sample.content))

    def encode_group(group: Sequence[Ref], step: int) -> Encoded:
        pixels = torch.stack([read_pixels(ref) for ref in group])
        mean, spread = encoders.encode_image(pixels.permute(0, 3, 1, 2).float() / 127.5 - 1.0)
        epoch = step // feed.plan.steps_per_epoch
        cond = encoders.encode_text([data.caption(ref, step, epoch, seed) for ref in group])
        return mean + spread * torch.randn_like(spread), cond

    return lambda step: [encode_group(group, step) for group in feed.groups(step)]


# ---- public architectures


def small_unet() -> Architecture:
    """A U-Net of 30 M weights, for machines on which no published model trains."""
    path = Path(__file__).with_name("small_unet.json")
    document = json.loads(path.read_text(encoding="utf-8"))
    return Architecture(ModelFacts(path=path, named=SMALL, **document["facts"]), document["denoiser"])


def thin_architecture(architecture: Architecture) -> Architecture:
    """The same kinds of blocks, narrow and few, for small images: for machines without a GPU."""
    facts = architecture.facts
    side = max(facts.pixel_step, facts.resolution // TINY // facts.pixel_step * facts.pixel_step)
    thin = FAMILIES[facts.family].denoiser.thin(architecture.denoiser)
    return Architecture(replace(facts, resolution=side), thin)


def public_model(
    resolved: Resolved,
    name: str,
    folder: Path,
    *,
    tiny: bool = False,
    shapes: int = 1,
    member: Member | None = None,
) -> BenchModel:
    """A published denoiser with random weights and random inputs: no model, no data, no encoders."""
    architecture = small_unet() if name == SMALL else public_architecture(name)
    suitable = suited(resolved, architecture.facts.prediction)
    config = suitable.config
    family = reading(config, FAMILIES[architecture.facts.family])
    title = "U-Net of 30 M weights" if name == SMALL else name
    if tiny and name != SMALL:
        architecture = thin_architecture(architecture)
        title += f" at {family.denoiser.thinness}"
    facts, processes = architecture.facts, join_processes()
    choices = choose(suitable, family, architecture, processes.device, 1)
    cap_memory(config, processes.device)
    set_hardware(config, processes.device)

    side = trained_resolution(config, facts)
    latents = (choices.micro, facts.latent_channels, side // facts.downscale, side // facts.downscale)
    alone = Processes(0, 1, choices.device, None, lambda: None)
    loadable, stored = loadable_family(family, architecture), (name, str(choices.layout))
    context = build_step_context(
        config,
        loadable if member is None else member.sharing(loadable, stored),
        facts,
        replace(choices.layout, compiled=config.compile.enabled is True, shapes=shapes, latents=latents),
        alone,
        is_attention_requested=asked_by_user(suitable, "hardware.attention_backend"),
    )
    if member is not None:
        context = member.join(context, stored, lambda line: None)
    if config.loss.guidance_target is not None:
        cond_shapes = family.text.cond_shapes(architecture.denoiser)
        empty = {name: torch.zeros(shape) for name, shape in cond_shapes.items()}
        scale, device, dtype = config.loss.guidance_target, context.device, context.dtype
        guidance = make_guidance_target(scale, context.denoiser, empty, device, dtype)
        context = guidance.applied_to(context)

    count = max(RANDOM_SAMPLES, config.train.effective_batch_size)
    data = write_random_cache(family, architecture, side, count, folder)
    run = Run(
        config=config,
        folder=folder,
        context=context,
        feed=make_feed(config, data, context, alone, choices.micro, ENDLESS),
        processes=processes,
        planned=OomFallback(choices.micro, context.built.checkpointed, swapped=context.built.swapped),
        total_steps=ENDLESS,
        validate=None,
        sample=None,
        settings={},
        say=lambda line: None,
    )
    return BenchModel(f"{title}, {side} px, random weights", resolved, run, choices, family, architecture)


def loadable_family(family: Family, architecture: Architecture) -> Family:
    """The family, its denoiser and noise schedule made from the architecture in place of a folder."""

    def load_denoiser(
        folder: Path, dtype: torch.dtype, device: torch.device, narrow: Narrow | None = None
    ) -> nn.Module:
        return with_random_weights(lambda: family.denoiser.make(architecture.denoiser), dtype, device, narrow)

    def make_process(folder: Path) -> Process:
        return usual_process(cast("Prediction", architecture.facts.prediction))

    return replace(family, denoiser=replace(family.denoiser, load=load_denoiser, make_process=make_process))


def write_random_cache(family: Family, architecture: Architecture, side: int, count: int, folder: Path) -> CachedData:
    """Samples of one size with random latents and text embeddings, cached in `folder`."""
    facts, generator = architecture.facts, torch.Generator().manual_seed(0)
    keys = [f"{number:064x}" for number in range(count)]
    shape = (count, facts.latent_channels, side // facts.downscale, side // facts.downscale)
    mean = torch.randn(shape, generator=generator)
    write_entries(folder, "latents", keys, {"mean": mean, "spread": torch.full(shape, 0.1)})
    shapes = family.text.cond_shapes(architecture.denoiser).items()
    texts = {name: torch.randn((count, *each), generator=generator) for name, each in shapes}
    write_entries(folder, "texts", keys, texts)
    return CachedData(
        samples=[Sample(Path(f"{key}.png"), key, side, side, key[::-1]) for key in keys],
        views=[(View(ResizeCrop(side, side, 0, 0, Bucket(side, side))),)] * count,
        latent_keys=[(key,) for key in keys],
        text_keys=[(key,) for key in keys],
        empty_key=keys[0],
        latents=Store(folder, "latents"),
        texts=Store(folder, "texts"),
    )
