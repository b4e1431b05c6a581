"""Sampling settings from a config, and the image grid that a run makes of its own LoRA."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.grid import image_name
from lora_trainer.core.io import read_json
from lora_trainer.data.captions import TRIGGER
from lora_trainer.monitor.tracker_kinds.interface import ShownImage
from lora_trainer.run_folder.record import BEFORE_AFTER

if TYPE_CHECKING:
    from lora_trainer.config.schema import Config
    from lora_trainer.data.sample import Sample
    from lora_trainer.evaluation.recipe import Drawing, ImageRequest
    from lora_trainer.models.family import Family, ModelFacts
    from lora_trainer.run.inputs import Inputs
    from lora_trainer.run.session import Session

TRIGGER_PHRASE = "modelspec.trigger_phrase"  # in a LoRA file's header
BUILT_IN = "built-in"
LONGEST_TAG = 60  # characters of a prompt in a tracker's list
# The keys of [model] that images depend on, besides its name.
MODEL_PARTS = ("revision", "vae", "text_encoders", "flavor", "prediction_type", "without_t5", "loras")


def drawing_of(config: Config, family: Family, facts: ModelFacts, size: tuple[int, int]) -> Drawing:
    """How images are generated: the config's settings, then the model's defaults."""
    from lora_trainer.evaluation.recipe import Drawing

    sampling_defaults, sample = family.pipeline.sampling_defaults(facts.path), config.sample
    return Drawing(
        steps=sample.num_inference_steps or sampling_defaults.steps,
        guidance=sample.guidance_scale if sampling_defaults.guided else None,
        size=size,
        negative=sample.negative_prompt if sampling_defaults.negative else None,
        strengths=tuple(dict.fromkeys(sample.strengths)),
        zero_terminal_snr=config.noise.zero_terminal_snr and facts.prediction != "flow",
    )


def parts_of(config: Config) -> dict[str, Any]:
    """The model's settings that a recipe keeps besides its name: those that are set."""
    return {name: value for name in MODEL_PARTS if (value := getattr(config.model, name))}


def with_parts(config: Config, found: Mapping[str, Any], *, named: bool) -> Config:
    """The settings with a recipe's `model_parts`, except those that are set. `named`: the model is not the recipe's.

    Raises UsageError for parts of another type.
    """
    recorded = found.get("model_parts") or {}
    try:
        own = {**parts_of(config), **({"revision": config.model.revision} if named else {})}
        parts = {name: recorded[name] for name in MODEL_PARTS if name in recorded and name not in own}
        model = type(config.model).model_validate({**config.model.model_dump(), **parts})
    except (TypeError, ValidationError) as error:
        message = "The recipe's model_parts are not settings of a model."
        raise UsageError(Problem("recipe_invalid", message, "Use another recipe.")) from error
    return config.model_copy(update={"model": model})


def rows_for(prompts: list[str], seeds: list[int]) -> list[ImageRequest]:
    """Every prompt with every seed, a prompt's seeds next to each other."""
    from lora_trainer.evaluation.recipe import ImageRequest

    return [ImageRequest(prompt, seed) for prompt in dict.fromkeys(prompts) for seed in dict.fromkeys(seeds)]


def filled(prompt: str, words: tuple[str, ...]) -> str:
    """The prompt with the first of the learned words in place of `[trigger]`."""
    return prompt.replace(TRIGGER, words[0]) if words else prompt


def prefixed(prompt: str, prefix: str) -> str:
    """The prompt behind the tags of `sample.prompt_prefix` that it lacks."""
    own = {tag.strip() for tag in prompt.split(",")}
    tags = [tag for tag in map(str.strip, prefix.split(",")) if tag not in own]
    return ", ".join(filter(None, [*tags, prompt]))


def triggers(config: Config) -> tuple[str, ...]:
    """Trigger words and learned tokens, each once: the run's, those of sources with captions of their own, then tokens."""
    own = [source.captions for source in config.data.sources if source.captions and not source.is_reg]
    named = (*(rules.trigger_word for rules in (config.captions, *own)), *config.textual_inversion.placeholder_tokens)
    return tuple(dict.fromkeys(trigger for trigger in named if trigger))


def triggers_of(config: Config, header: Mapping[str, str]) -> tuple[str, ...]:
    """Those of the settings; without any, the first that a LoRA file's header names."""
    if named := triggers(config):
        return named
    phrase = header.get(TRIGGER_PHRASE, "").partition(",")[0].strip()
    return (phrase,) if phrase else ()


def sample_rows(config: Config, inputs: Inputs, seeds: Sequence[int]) -> list[ImageRequest]:
    """The prompts that are set, `[trigger]` replaced; else different captions of the data, validation ones first. All
    behind `sample.prompt_prefix`, each with every seed, and of an edit model with control images: those that are set,
    else the data's."""
    samples = (*inputs.validation, *inputs.train)
    learned = [sample for sample in samples if not sample.regularization] or samples
    prefix = config.sample.prompt_prefix
    if not config.sample.prompts:
        of_prompts = {prefixed(sample.caption, prefix): sample for sample in reversed(learned)}
        chosen = list(dict.fromkeys(prefixed(sample.caption, prefix) for sample in learned))[: config.sample.count]
        rows = rows_for(chosen, list(seeds))
        return [controlled(row, of_prompts[row.prompt]) for row in rows]
    named = (prefixed(filled(prompt, triggers(config)), prefix) for prompt in config.sample.prompts)
    prompts = list(dict.fromkeys(named))
    rows = rows_for(prompts, list(seeds))
    if config.sample.control_images:
        return with_control_images(rows, config.sample.control_images)
    return [replace(controlled(row, learned[prompts.index(row.prompt) % len(learned)]), target="") for row in rows]


def controlled(row: ImageRequest, sample: Sample) -> ImageRequest:
    """The row with a sample's control images and, as what they should become, the sample's own image."""
    if not sample.controls:
        return row
    target = "" if sample.span else str(sample.path)  # an image inside of a tar is no file
    return replace(row, controls=tuple(str(each.path) for each in sample.controls), target=target)


def with_control_images(rows: Sequence[ImageRequest], files: Sequence[str]) -> list[ImageRequest]:
    """The rows with their prompts' control images, equally many for each prompt, or one for all.

    `files` are as `run/inputs.py:check_control_images` demands.
    """
    prompts = list(dict.fromkeys(row.prompt for row in rows))
    places = [str(Path(file).expanduser().resolve()) for file in files]
    each = len(places) // len(prompts)
    own = {prompt: places[number * each : (number + 1) * each] or places for number, prompt in enumerate(prompts)}
    return [replace(row, controls=tuple(own[row.prompt])) for row in rows]


def run_drawing(config: Config, inputs: Inputs) -> Drawing:
    """How a run generates its images: squares of the training resolution."""
    side = inputs.resolution // inputs.facts.pixel_step * inputs.facts.pixel_step
    return drawing_of(config, inputs.family, inputs.facts, (side, side))


def draw_comparison(
    session: Session,
    lora: Path,
    *,
    name: str = BEFORE_AFTER,
    most: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Path:
    """Generate images of the run's prompts without the LoRA and with it, same seeds; the path of their sheet.

    At most `most` prompts and strengths, where it is set.
    """
    from lora_trainer.evaluation.compute import Compute
    from lora_trainer.evaluation.placing import with_less
    from lora_trainer.evaluation.recipe import Grid, NamedModel
    from lora_trainer.evaluation.sample import Where, compare
    from lora_trainer.run.choices import usable_bytes

    config, inputs, choices = session.config, session.inputs, session.choices
    seeds = [config.train.seed + index for index in range(config.sample.num_images_per_prompt)]
    rows = sample_rows(config, inputs, seeds)[:most]
    drawing, where = run_drawing(config, inputs), Where(session.folder / "samples", name)
    grid = Grid(rows, replace(drawing, strengths=drawing.strengths[:most]))
    model = NamedModel(inputs.family, inputs.facts.path, config.model.path or BUILT_IN, parts_of(config))
    usable = usable_bytes(config, choices.device)
    compute = Compute(choices.dtype, choices.device, usable, say=session.console.print, progress=progress)
    with_less(partial(compare, model, lora, grid, where), compute)
    return where.sheet


def shown_images(folder: Path, name: str, *, with_base: bool = False) -> list[ShownImage]:
    """The images of a run's grid for its trackers: a series for each prompt and strength, named by both.

    `with_base` adds those without the LoRA, which are the same in every grid. Images that are missing are left out.
    """
    try:
        drawn = read_json(folder / "samples" / f"{name}.json")
    except (OSError, ValueError):
        return []
    found = []
    for index, row in enumerate(drawn["images"]):
        # Trackers make file names of tags, and a slash begins a group.
        short = re.sub(r'[<>:"|?*/\\]', " ", textwrap.shorten(row["prompt"], LONGEST_TAG, placeholder="…"))
        for strength in (*([None] if with_base else []), *drawn["strengths"]):
            path = folder / "samples" / image_name(name, index, strength)
            shown_with = "without LoRA" if strength is None else f"strength {strength:g}"
            if path.is_file():
                tag, caption = f"samples/{index + 1} {short}, {shown_with}", f"{row['prompt']} (seed {row['seed']})"
                found.append(ShownImage(tag, path, caption))
    return found
