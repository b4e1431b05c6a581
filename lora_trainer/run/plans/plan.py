"""What a run will take, before anything is loaded: memory, disk, steps, least time. No torch for published models."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.adapters.adapter_kinds import ADAPTERS, denoiser_options
from lora_trainer.config.contradictions import from_user
from lora_trainer.core.errors import UsageError
from lora_trainer.core.findings import counted
from lora_trainer.core.gpu_rates import least_seconds
from lora_trainer.core.io import user_cache_folder
from lora_trainer.core.tensorfile import elements, read_tensor_header
from lora_trainer.data.captions import canonical, rules_of, settled
from lora_trainer.data.sample import Sample
from lora_trainer.data.split import split_validation
from lora_trainer.data.views import plan_views
from lora_trainer.dataset_check.image_checks import UPSCALE_LIMIT
from lora_trainer.memory_plan.estimate import (
    GIB,
    NARROWER,
    Demand,
    MemoryPlan,
    RunsTogether,
    choose_fit,
    parts_of,
    runs_together,
    shortage,
    to_use,
    too_large,
    what_would_fit,
)
from lora_trainer.memory_plan.host import Host, host_of
from lora_trainer.memory_plan.memory_model import traced_memory_model
from lora_trainer.memory_plan.profiles import MemoryModel, stored_memory_model
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.family import PLAIN, Architecture, Family, ModelFacts
from lora_trainer.models.memory.phases import costs_of, encoding_bytes
from lora_trainer.models.published import public_architecture
from lora_trainer.run.class_images import planned_class_images
from lora_trainer.run.file_sizes import cache_bytes, run_bytes
from lora_trainer.run.inputs import (
    arithmetic,
    caption_rules,
    class_image_side,
    largest_of,
    list_data,
    named_controls,
    read_architecture,
    read_model,
    trained_framings,
    trained_resolution,
)
from lora_trainer.run.plans.gpu_phases import PhasePlan, other_peaks, plan_phases
from lora_trainer.run.plans.host_phases import host_phases
from lora_trainer.run.plans.texts import text_sizes
from lora_trainer.run.plans.what_if import Bought, what_settings_buy
from lora_trainer.run.reading import reading

if TYPE_CHECKING:
    from lora_trainer.config.layers import Resolved
    from lora_trainer.config.schema import Config

DECIDED = ("micro_batch_size", "gradient_checkpointing", "weight_dtype", "blocks_to_swap")
WORTH_FREEING_GIB = 0.1
WORTH_BESIDE = 0.2  # of what the largest saving frees
KEEPS_SCORES = ("math",)
Data = tuple[tuple[Sample, ...], tuple[Sample, ...]]  # trained, held out


@dataclass(frozen=True)
class Plan:
    """`demand` is what was asked, `fit` what was chosen; `steps` is None without data or a number of steps."""

    family: str
    model: str
    demand: Demand
    fit: MemoryPlan
    steps: int | None
    disk_gib: float
    phases: Mapping[str, PhasePlan]
    advice: tuple[str, ...]
    adapter: str = "LoRA"  # the title of its kind
    computed: str = "bf16"  # what products are computed in
    attention: str = "auto"
    tracing: Callable[[], MemoryModel] | None = None  # for `--what-if`: traces what no memory profile has

    @cached_property
    def fits(self) -> bool | None:
        """Whether every phase does; None where it is not known, as scores are not counted that attention keeps."""
        if self.shortages:
            return False
        return None if self.attention in KEEPS_SCORES and self.demand.limit_gib is not None else True

    def least(self, tflop: float) -> dict[str, float]:
        """Seconds of so many operations on the usual GPUs."""
        return least_seconds(tflop, self.computed)

    @cached_property
    def shortages(self) -> list[str]:
        """A sentence for each phase that does not fit."""
        limit = self.demand.limit_gib or math.inf
        found = [] if self.fit.fits else [shortage(self.demand, self.fit)]
        for name in too_large(self.demand, self.fit):
            phase = self.phases[name]
            found.append(f"{name} needs {phase.peak_gib:.1f} GiB ({phase.placement}); {to_use(limit)}.")
        return found

    @cached_property
    def settings(self) -> list[Bought]:
        """What each single change of a setting would make of it; none where each must be traced and nobody asked."""
        if self.tracing is not None:
            return what_settings_buy(self.demand, self.fit, self.tracing())
        return [] if self.demand.memory_model.traced else what_settings_buy(self.demand, self.fit)

    @cached_property
    def host(self) -> Host:
        """Host memory of the training."""
        return host_of(self.demand, self.fit)

    def to_json(self, together: int = 0) -> dict[str, Any]:
        """The document of `plan --json`, with `together` runs on one base model where that is asked."""
        fit, parts, demand = self.fit, self.fit.parts, self.demand
        sizes = {name: getattr(parts, name) for name in ("weights", "adapter", "optimizer", "activations", "overhead")}
        return {
            "family": self.family,
            "model": self.model,
            "resolution": demand.resolution,
            "rank": demand.rank,
            "fits": self.fits,
            "limit_gib": demand.limit_gib,
            "peak_gib": round(sum(round(size, 4) for size in sizes.values()), 4),
            **{f"{name}_gib": round(size, 4) for name, size in sizes.items()},
            "margin_gib": None if demand.limit_gib is None else round(demand.limit_gib - parts.peak, 4),
            "micro_batch_size": fit.micro,
            "gradient_accumulation_steps": fit.accumulation,
            "gradient_checkpointing": fit.checkpointed,
            "blocks": fit.blocks,
            "weight_dtype": fit.precision,
            "blocks_to_swap": fit.swapped,
            "host_gib": round(self.host.most, 4),
            "host_peak_gib": round(max(phase.host_gib for phase in self.phases.values()), 4),
            "swappable_blocks": fit.swappable,
            "reasons": dict(zip(DECIDED, fit.reasons, strict=True)),
            "train_tflop_per_step": round(parts.tflop, 4),
            "seconds_per_step_at_least": {gpu: round(time, 5) for gpu, time in self.least(parts.tflop).items()},
            "computed_in": self.computed,
            "steps": self.steps,
            "disk_gib": round(self.disk_gib, 4),
            "phases": {name: phase.to_json() for name, phase in self.phases.items()},
            "predicted_from": demand.memory_model.source,
            "settings": [each.to_json() for each in self.settings],
            "advice": list(self.advice),
            "together": [
                {"runs": each.runs, "in_a_pass": each.in_a_pass, "peak_gib": round(each.parts.peak, 4)}
                for each in (self.together(together) if together else ())
            ],
        }

    def together(self, most: int) -> list[RunsTogether]:
        """1, 2, 4, ... and `most` such runs on one base model (`batch --together`)."""
        return runs_together(self.demand, self.fit, most)


def make_plan(
    resolved: Resolved,
    families: Mapping[str, Family] = FAMILIES,
    gpu_gib: float | None = None,
    data: Data | None = None,
    *,
    every_setting: bool = False,
    here: bool = False,
) -> Plan:
    """Plan a run on a GPU of `gpu_gib`, or of `memory.limit_gib` where that is less; without both nothing limits it.

    `data` is what is trained and what is held out, where that is known; else it is listed without decoding an image.
    `every_setting` says what each single change of a setting buys, also where it must be traced for that.
    `here`: on this machine's GPU, as a run decides; else nf4 is taken to be at hand, and what it needs is said.
    Raises UsageError for a model or data that cannot be read.
    """
    config = resolved.config
    family, architecture = architecture_of(config, families)
    limits = [limit for limit in (config.memory.limit_gib, gpu_gib) if limit is not None]
    train, validation = planned_data(config, architecture.facts) if data is None else data
    demand = make_demand(resolved, family, architecture, min(limits, default=None))
    if train:
        largest = largest_of(config, train, plan_views(train, trained_framings(config, architecture.facts)), 1)
        demand = replace(demand, samples=largest.samples, in_bucket=largest.in_bucket)
    if here:
        demand = storable_here(demand)
    fit = choose_fit(demand)
    counted = arithmetic(config, train, fit.micro, 1) if train else None
    steps = counted.total if counted else config.train.max_steps
    cached = cache_bytes(config, family, architecture, train, validation)
    facts = architecture.facts
    return Plan(
        family=family.name,
        model=facts.name if facts.named != facts.family else f"published {facts.variant or 'model'}",
        demand=demand,
        fit=fit,
        steps=steps,
        disk_gib=(cached + run_bytes(config, demand.shapes, steps, counted.steps_per_epoch if counted else None)) / GIB,
        phases=phases_of(resolved, demand, fit, family, architecture.facts),
        advice=(
            *too_small(config, architecture.facts, (*train, *validation)),
            *uncaptioned(config, (*train, *validation)),
            *uncounted(config),
            *over_several_gpus(config, demand, fit),
            *advice(demand, fit, architecture),
        ),
        adapter=ADAPTERS[config.lora.type].title,
        computed=computed_in(config, fit.precision),
        attention=config.hardware.attention_backend,
        tracing=partial(tracing_gauge, family, architecture, config) if every_setting else None,
    )


def phases_of(
    resolved: Resolved, demand: Demand, fit: MemoryPlan, family: Family, facts: ModelFacts
) -> dict[str, PhasePlan]:
    """What each phase holds of the GPU, and of host memory."""
    images, asked = resolved.config.cache.batch_size, from_user(resolved.origin["memory.weight_dtype"])
    on_gpu = plan_phases(demand, fit, facts, images, family.text.options.without)
    own = resolved.config.memory.weight_dtype if asked else "fp32"
    hosted = host_phases(demand, fit, family, facts, images, own)
    return {name: replace(phase, host_gib=hosted[name]) for name, phase in on_gpu.items()}


def computed_in(config: Config, precision: str) -> str:
    """What products of weights stored so are computed in, on a GPU that has it."""
    if precision == "fp32":
        return "tf32" if config.hardware.tf32 else "fp32"
    return "int8" if precision == "int8" and config.memory.int8_matmul else "bf16"


def architecture_of(config: Config, families: Mapping[str, Family]) -> tuple[Family, Architecture]:
    """The family's published model when only a family is named, else the folder's own or the built-in base's."""
    if config.model.path is None and config.model.family is not None:
        return reading(config, families[config.model.family]), public_architecture(config.model.family)
    family, facts = read_model(config, families, weights=False)
    return family, read_architecture(family, facts)


def make_demand(
    resolved: Resolved,
    family: Family,
    architecture: Architecture,
    limit_gib: float | None,
    *,
    world: int = 1,
    precision: str | None = None,
) -> Demand:
    """The settings as a demand on a GPU. `precision` replaces `memory.weight_dtype` where the GPU changes it."""
    config, facts = resolved.config, architecture.facts
    # Values beside the base model's weights. Merged LoRAs have none, but where those are quantized.
    beside = list(config.model.loras) if config.memory.weight_dtype in ("fp8", "int8", "nf4") else []
    if config.model.training_adapter is not None:
        beside.append(config.model.training_adapter)
    first = precision or config.memory.weight_dtype
    asked = from_user(resolved.origin["memory.weight_dtype"]) or limit_gib is None or first == "fp32"
    return Demand(
        memory_model=gauge_of(family, architecture, config),
        rank=config.lora.rank,
        resolution=trained_resolution(config, facts),
        several=bool(config.data.resolutions),
        downscale=facts.downscale,
        pixel_step=facts.pixel_step,
        samples=math.ceil(config.train.effective_batch_size / world),
        max_micro=config.train.max_micro_batch_size,
        checkpointing=config.memory.gradient_checkpointing,
        precisions=(first,) if asked else (first, *NARROWER[NARROWER.index(first) + 1 if first in NARROWER else 0 :]),
        streaming=0 if config.memory.fsdp and world > 1 else config.memory.blocks_to_swap,
        shards=world if config.memory.fsdp else 1,
        regathered=config.memory.fsdp == "full_shard",
        recompute=config.memory.checkpointing_mode,
        offloaded=config.memory.offload_activations,
        optimizer=config.optimizer.name,
        averaged=config.train.averages_weights,
        rounded=config.optimizer.stochastic_rounding,
        limit_gib=limit_gib,
        encoder=(0, 0) if config.cache.latents else encoding_bytes(costs_of(facts)),
        others=partial(other_peaks, facts=facts, images=config.cache.batch_size, without=family.text.options.without),
        texts=text_sizes(config, family, facts),
        controls=named_controls(config),
        control_tokens=facts.control_tokens,
        frozen=sum(elements(read_tensor_header(Path(path).expanduser())) for path in beside),
        guided=config.loss.guidance_target is not None,
        preserved=bool(config.loss.output_preservation_weight) / config.loss.output_preservation_every_n_steps,
    )


def storable_here(demand: Demand) -> Demand:
    """The demand without nf4 where that would be chosen and bitsandbytes cannot be used; who asks for nf4 keeps it.

    The library is imported, which takes a second, only where nf4 is about to be chosen.
    """
    others = tuple(each for each in demand.precisions if each != "nf4")
    if others == demand.precisions or not others or choose_fit(demand).precision != "nf4":
        return demand
    from lora_trainer.models.quantization.four_bits import need_library

    try:
        need_library()
    except UsageError:
        return replace(demand, precisions=others)
    return demand


def gauge_of(family: Family, architecture: Architecture, config: Config) -> MemoryModel:
    """The stored memory profile of a published model, else a traced one.

    Stored profiles do not cover activation offloading, int8 matmul, or captions of another length than the model's.
    """
    lengths = replace(family.text.options, clip_skip=None, without=()) != PLAIN  # which change no length
    unwritten = (
        not ADAPTERS[config.lora.type].has_memory_profiles
        or not denoiser_options(config).has_usual_size
        or config.memory.offload_activations
        or config.memory.int8_matmul
        or lengths
    )
    stored = None if unwritten else stored_memory_model(architecture, config.lora.target_modules)
    return stored or tracing_gauge(family, architecture, config)


def tracing_gauge(family: Family, architecture: Architecture, config: Config) -> MemoryModel:
    targets, rank, products = config.lora.target_modules, config.lora.rank, config.memory.int8_matmul
    options = denoiser_options(config)
    return traced_memory_model(
        family,
        architecture,
        targets,
        user_cache_folder(),
        rank,
        products=products,
        kind=config.lora.type,
        options=None if options.has_usual_size else options,
    )


def planned_data(config: Config, facts: ModelFacts) -> Data:
    """The samples that would be trained on and those held out, without decoding an image; none when no data is named."""
    if not config.data.sources:
        return (), ()
    manifest, _ = list_data(config, allow_missing_captions=True)
    kept = config.validation
    train, validation = split_validation(manifest.samples, kept.split, kept.split_seed)
    train, rules = (*train, *planned_class_images(config, class_image_side(config, facts))), caption_rules(config)
    return settled(train, rules), tuple(map(canonical, settled(validation, rules)))


def too_small(config: Config, facts: ModelFacts, samples: tuple[Sample, ...]) -> list[str]:
    """Images that a run would refuse, by their sizes alone."""
    if config.data.allow_small_images or not samples:
        return []
    fits = plan_views(samples, trained_framings(config, facts)).fits
    factors = [fit.scale_from(each.width, each.height) for each, fit in zip(samples, fits, strict=True)]
    small = [factor for factor in factors if factor > UPSCALE_LIMIT]
    if not small:
        return []
    enlarged = f"{len(small)} of {counted(len(samples), 'image')} would be enlarged up to {max(small):.1f} times"
    return [f"{enlarged}: train refuses them. Set data.resolution lower, or --set data.allow_small_images=true."]


def uncaptioned(config: Config, samples: tuple[Sample, ...]) -> list[str]:
    """What becomes of images without a caption, of which there may be some."""
    bare = [each for each in samples if not each.written]
    if not bare or config.data.allow_missing_captions:
        return []
    words = {rules_of(each, caption_rules(config)).trigger_word for each in bare}
    what = f"{len(bare)} of {counted(len(samples), 'image')} have no caption"
    if None not in words:
        return [f"{what}: the trigger word {' or '.join(map(repr, sorted(filter(None, words))))} alone is trained."]
    ways = "`lora-trainer caption` writes captions; --set captions.trigger_word=WORD trains that word alone."
    return [f"{what}: train refuses them. {ways}"]


def uncounted(config: Config) -> list[str]:
    """What the plan leaves out of what these settings hold on a GPU."""
    if config.hardware.attention_backend not in KEEPS_SCORES:
        return []
    named = f"hardware.attention_backend={config.hardware.attention_backend}"
    return [
        f"{named} keeps every score, which is not counted, so a fit is not promised: hardware.attention_backend=auto keeps none."
    ]


def over_several_gpus(config: Config, demand: Demand, fit: MemoryPlan) -> list[str]:
    """The peak of each GPU where several share the base model's weights; the plan itself is of one."""
    if config.memory.fsdp is None:
        return []
    peaks = {
        gpus: parts_of(replace(demand, shards=gpus), fit.micro, fit.checkpointed, fit.precision, 0).peak
        for gpus in (2, 4, 8)
    }
    shown = ", ".join(f"{peak:.1f} GiB on each of {gpus} GPUs" for gpus, peak in peaks.items())
    return [f"memory.fsdp={config.memory.fsdp} divides the weights: the peak would be {shown}. The plan is of one GPU."]


def advice(demand: Demand, fit: MemoryPlan, architecture: Architecture) -> list[str]:
    """What would fit, where nothing does; else what would be gained, and by what."""
    if not fit.fits or too_large(demand, fit):
        return what_would_fit(demand)
    found = ["nf4 weights need bitsandbytes (pip install bitsandbytes)."] if fit.precision == "nf4" else []
    if fit.checkpointed:  # what was tried before it, so that nothing is traced for it
        without = parts_of(demand, fit.micro, 0, fit.precision, fit.swapped)
        more = fit.parts.tflop / without.tflop - 1
        found.append(
            f"Checkpointing costs {more:.0%} more operations; without it the peak would be {without.peak:.1f} GiB."
        )
    if fit.precision != demand.precisions[0]:
        wide = parts_of(demand, fit.micro, fit.blocks, demand.precisions[0], fit.swapped)
        visiting = f" and {fit.swapped} of {fit.swappable} swapped" if fit.swapped else ""
        found.append(f"{demand.precisions[0]} weights need {wide.peak:.1f} GiB with all blocks checkpointed{visiting}.")
    ways = {"optimizer.name=adamw8bit": (replace(demand, optimizer="adamw8bit"), fit.checkpointed)}
    if not (fit.checkpointed or demand.memory_model.traced):  # blocks checkpointed would be traced for it
        ways["memory.gradient_checkpointing=true"] = (demand, fit.blocks)
    freed = {
        setting: fit.parts.peak - parts_of(changed, fit.micro, checkpointed, fit.precision, fit.swapped).peak
        for setting, (changed, checkpointed) in ways.items()
    }
    most = max(freed.values())
    found += [
        f"{setting} would free {gib:.1f} GiB."
        for setting, gib in sorted(freed.items(), key=lambda item: -item[1])
        if gib > max(WORTH_FREEING_GIB, WORTH_BESIDE * most)
    ]
    native = architecture.facts.resolution
    if demand.memory_model.traced:
        return found  # other sizes would be traced for it
    if demand.limit_gib is not None and demand.resolution < native:
        whole = choose_fit(replace(demand, resolution=native))
        visiting = f" and {whole.swapped} of {whole.swappable} swapped" if whole.swapped else ""
        verdict = (
            f"fits too, at {whole.parts.peak:.1f} GiB with {whole.precision} weights, {whole.checkpointed} of "
            f"{whole.blocks} blocks checkpointed{visiting}: --set {demand.at(native)}"
            if whole.fits
            else f"does not fit: it needs {whole.parts.peak:.1f} GiB"
        )
        found.append(f"The model's own {native} px {verdict}.")
    return found
