"""The arguments of `sample`, and the settings that they make."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lora_trainer.cli.arguments import add_offline_argument, add_settings_arguments, resolved_from
from lora_trainer.config.layers import Layer
from lora_trainer.core.errors import Problem, UsageError

EXAMPLES = """examples:
  lora-trainer sample runs/cat/cat.safetensors --prompt "a photo of my cat"
  lora-trainer sample cat.safetensors --model ./my-sd15 --prompt "my cat"
  lora-trainer sample cat.safetensors --prompt cat --strength 0.5 --strength 1
  lora-trainer sample cat.safetensors --recipe before_after.json
"""
MOST_SEEDS = 64
LARGEST_SIDE = 8192
BY_RECIPE = (
    "prompt",
    "strength",
    "num_images_per_prompt",
    "seed",
    "negative_prompt",
    "control_image",
    "num_inference_steps",
    "guidance_scale",
    "size",
)


def add_sample_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("lora", metavar="LORA", help="the LoRA file, of this program or another")
    parser.add_argument(
        "--model",
        dest="model.path",
        metavar="MODEL",
        help="the base model: folder, .safetensors file or hub id (default: that of the run beside the file, "
        "else the built-in one)",
    )
    parser.add_argument(
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="the prompt (repeatable); [trigger] is replaced by the LoRA's trigger word",
    )
    parser.add_argument(
        "--strength", action="append", type=float, metavar="X", help="strength of the LoRA (repeatable; default: 1)"
    )
    parser.add_argument("--negative-prompt", metavar="TEXT", help="the negative prompt")
    parser.add_argument(
        "--control-image",
        action="append",
        metavar="FILE",
        help="control image of an edit model (repeatable: those of the first prompt, then those of the second, "
        "or one for all)",
    )
    parser.add_argument(
        "--num-images-per-prompt", type=int, metavar="N", help="images of each prompt, with seeds that count up"
    )
    parser.add_argument(
        "--seed",
        action="append",
        type=int,
        metavar="S",
        help="the first seed, or all of them (repeatable; default: 0)",
    )
    parser.add_argument(
        "--num-inference-steps", type=int, metavar="N", help="sampler steps (default: usual for the model)"
    )
    parser.add_argument("--guidance-scale", type=float, metavar="G", help="guidance scale (default: the family's)")
    parser.add_argument("--size", metavar="WxH", help="width and height in pixels (default: the model's own)")
    parser.add_argument(
        "--recipe", metavar="FILE", help="generate the images of this .json again, beside earlier images"
    )
    parser.add_argument(
        "--output", dest="folder", metavar="DIR", help="folder for the images (default: samples, beside the file)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace earlier images of the same name")
    add_offline_argument(parser)
    add_settings_arguments(parser)


def sample(arguments: argparse.Namespace, unknown: Sequence[Problem]) -> int:
    """Run the command. Raises UsageError for an unreadable file, model or recipe, and for contradicting flags."""
    from lora_trainer.cli.sample import GridFolder, draw_again, sample_command
    from lora_trainer.run.sampling import BUILT_IN, with_parts

    problems = [*unknown, *_flag_problems(arguments)]
    size = _size(arguments.size)
    found: dict[str, Any] | None = None
    named = vars(arguments)["model.path"] is not None
    if arguments.recipe is not None:
        from lora_trainer.evaluation.recipe import read_recipe

        found = read_recipe(Path(arguments.recipe))
        values = vars(arguments)
        if values["model.path"] is None and found["model"] != BUILT_IN:
            values["model.path"] = found["model"]
    lora = None if found is not None else Path(arguments.lora)
    config = resolved_from(arguments, problems, extra=_layers(arguments), lora=lora).config
    path = Path(arguments.folder) if arguments.folder is not None else Path(arguments.lora).parent / "samples"
    output = GridFolder(path, arguments.overwrite)
    if found is not None:
        again = with_parts(config, found, named=named)
        return draw_again(Path(arguments.lora), again, found, output)
    seeds = _seeds(
        arguments.seed or [0],
        config.sample.num_images_per_prompt
        if arguments.num_images_per_prompt is None
        else arguments.num_images_per_prompt,
    )
    return sample_command(
        arguments.lora,
        arguments.prompt,
        config,
        output=output,
        seeds=seeds,
        size=size,
    )


def _flag_problems(arguments: argparse.Namespace) -> list[Problem]:
    """All mistakes in the flags by themselves."""
    values = vars(arguments)
    problems: list[Problem] = []
    if arguments.recipe is not None:
        both = [f"--{name.replace('_', '-')}" for name in BY_RECIPE if values[name] not in (None, [])]
        if both:
            problems.append(
                Problem(
                    "flags_exclude_each_other",
                    f"--recipe and {', '.join(both)} contradict each other.",
                    "The recipe sets them: remove the flags.",
                )
            )
    elif not arguments.prompt and not arguments.config:
        problems.append(Problem("prompt_missing", "There is no prompt.", 'For example: --prompt "a photo of my cat".'))
    if arguments.num_images_per_prompt is not None and not 1 <= arguments.num_images_per_prompt <= MOST_SEEDS:
        problems.append(
            Problem(
                "count_out_of_range",
                f"--num-images-per-prompt is {arguments.num_images_per_prompt}.",
                f"1 to {MOST_SEEDS} are generated at once.",
            )
        )
    if arguments.num_images_per_prompt is not None and len(arguments.seed or []) > 1:
        problems.append(
            Problem(
                "flags_exclude_each_other",
                "--num-images-per-prompt and several --seed contradict each other.",
                "Use one of them.",
            )
        )
    wrong = [seed for seed in arguments.seed or [] if not 0 <= seed < 2**63 - MOST_SEEDS]
    if wrong:
        problems.append(
            Problem("seeds_out_of_range", f"--seed is {wrong[0]}.", "Seeds are whole numbers from 0 to 2^63 - 1.")
        )
    return problems


def _layers(arguments: argparse.Namespace) -> list[Layer]:
    """The flags that are settings of `[sample]`, each under its own name."""
    flags = {
        "--num-inference-steps": ("num_inference_steps", arguments.num_inference_steps),
        "--guidance-scale": ("guidance_scale", arguments.guidance_scale),
        "--negative-prompt": ("negative_prompt", arguments.negative_prompt),
        "--strength": ("strengths", arguments.strength),
        "--control-image": ("control_images", arguments.control_image),
    }
    return [Layer(flag, {"sample": {key: value}}) for flag, (key, value) in flags.items() if value is not None]


def _seeds(first: Sequence[int], count: int) -> list[int]:
    return list(first) if len(first) > 1 else [first[0] + index for index in range(count)]


def _size(text: str | None) -> tuple[int, int] | None:
    """`832x1216` as (832, 1216). Raises UsageError."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,5})\s*[xX×]\s*(\d{1,5})", text.strip())
    if match is None or not all(1 <= int(side) <= LARGEST_SIDE for side in match.groups()):
        fix = f"Width x height in pixels, up to {LARGEST_SIDE}: --size 832x1216."
        raise UsageError(Problem("size_invalid", f"--size {text} is not a size.", fix))
    return int(match[1]), int(match[2])
