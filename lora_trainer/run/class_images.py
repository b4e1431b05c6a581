"""Class images: regularization images that the base model generates before training (prior preservation).

Which ones a run has is known before they exist: their number, size and prompts decide buckets and steps. No torch.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer import builtin
from lora_trainer.config.presets import family_layers
from lora_trainer.config.schema.results import SampleSection
from lora_trainer.data.caches.image_sets import image_path
from lora_trainer.data.sample import Sample
from lora_trainer.data.sources.texts import tidy
from lora_trainer.run.bases.find import is_builtin

if TYPE_CHECKING:
    from lora_trainer.config.schema import Config
    from lora_trainer.models.family import Family

# Of everything that a general model knows, some of each: what a LoRA forgets is what no image reminds it of.
PROMPTS = (
    "a photo of a woman smiling at the camera",
    "a photo of a man in a dark coat on a street",
    "a photo of two children playing in a park",
    "a portrait of an old man with a white beard",
    "a group of friends sitting around a table",
    "a woman riding a bicycle through a city",
    "a man cooking in a kitchen",
    "a runner on a country road",
    "a photo of a dog lying on the grass",
    "a photo of a cat on a windowsill",
    "a brown horse in a field",
    "a bird sitting on a branch",
    "an elephant walking through dry grass",
    "a close-up of a butterfly on a flower",
    "a mountain lake in the morning",
    "a sandy beach with waves and clouds",
    "a forest path in autumn",
    "a desert under a blue sky",
    "a snowy village at night",
    "a busy street in a large city",
    "an old stone bridge over a river",
    "a modern house with a garden",
    "a bright living room with a sofa",
    "the inside of a library",
    "a red car parked on a street",
    "a wooden boat on calm water",
    "a bowl of fruit on a wooden table",
    "a cup of coffee and a croissant",
    "a vase of flowers by a window",
    "an open book and a pair of glasses on a desk",
    "a watercolor painting of a landscape",
    "a pencil drawing of a tree",
)


def class_prompts(config: Config) -> tuple[str, ...]:
    """The prompt of each class image; its number is its seed, so that every run of a base model has the same ones."""
    usual = builtin.PROMPTS if is_builtin(config.model) else PROMPTS
    prompts = [tidy(prompt, keep_lines=False) for prompt in dict.fromkeys(config.data.class_prompts or usual)]
    return tuple(prompts[number % len(prompts)] for number in range(config.data.num_class_images))


def planned_class_images(config: Config, side: int) -> tuple[Sample, ...]:
    """A sample for each class image, squares of `side` pixels, whether it exists or not: no file and no digest is real."""
    prompts = class_prompts(config)
    contents = [hashlib.sha256(f"class image {number}".encode()).hexdigest() for number in range(len(prompts))]
    return class_samples(config, Path("class_images"), side, contents)


def class_samples(config: Config, folder: Path, side: int, contents: list[str]) -> tuple[Sample, ...]:
    """The samples of a set with these digests, as of one more source of regularization images."""
    return tuple(
        Sample(
            image_path(folder, number),
            prompt,
            side,
            side,
            content,
            source=class_source(config),
            regularization=True,
        )
        for number, (prompt, content) in enumerate(zip(class_prompts(config), contents, strict=True))
    )


def class_source(config: Config) -> int:
    """The number of the source that class images are: the one after the data's."""
    return len(config.data.sources) or 1


def sampler_settings(config: Config, family: Family, folder: Path) -> dict[str, Any]:
    """`steps`, `guidance` and `negative` that are usual with the model in `folder`.

    Not those of `[sample]`, which change on resuming without changing what is trained.
    """
    usual = family.pipeline.sampling_defaults(folder)
    sample: dict[str, Any] = {"guidance_scale": SampleSection().guidance_scale}
    for layer in family_layers(family.name, builtin=is_builtin(config.model)):
        sample |= layer.values.get("sample", {})
    return {
        "steps": sample.get("num_inference_steps") or usual.steps,
        "guidance": sample["guidance_scale"] if usual.guided else None,
        "negative": "" if usual.negative else None,
    }
