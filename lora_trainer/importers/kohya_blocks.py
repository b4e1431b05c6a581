"""kohya's learning rates of blocks (`down_lr_weight`, `mid_lr_weight`, `up_lr_weight`) as patterns of layers.

Its scripts number the places of a U-Net: two of the down blocks' and three of the up blocks' in each, and the samplers
between them. Stable Diffusion 1.5 and 2.x have 12 on each side and one in the middle, SDXL 9 and three.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from lora_trainer.importers.flow_words import NOT_READ, kohya_family
from lora_trainer.importers.reading import Around, KeyRule, Took
from lora_trainer.importers.rules import by, is_on, number
from lora_trainer.importers.words import ALL_WITH_CONVOLUTIONS

DOWN, MID, UP = "down_lr_weight", "mid_lr_weight", "up_lr_weight"
THRESHOLD = "block_lr_zero_threshold"  # weights up to it are 0 there
PLACES, PLACES_OF_SDXL = 12, 9  # on each side
OURS = "optimizer.layer_learning_rates"
# Words in place of numbers -> the weight of a place, by its share of the way.
CURVES: Mapping[str, Callable[[float], float]] = {
    "sine": lambda share: math.sin(share * math.pi / 2.0),
    "cosine": lambda share: math.sin((1.0 - share) * math.pi / 2.0),
    "linear": lambda share: share,
    "reverse_linear": lambda share: 1.0 - share,
    "zeros": lambda share: 0.0,
}


def block_rates(targets: Callable[[Any, Around], Took]) -> dict[str, KeyRule]:
    """The rules of the four keys, each of which reads all of them. `targets` reads which layers learn."""

    def read(value: Any, around: Around) -> Took:
        if kohya_family(around):
            return Took({}, NOT_READ, "ignored")
        module = around["network_module"]
        learned = targets(module, around).settings["lora.target_modules"] if isinstance(module, str) else ()
        factors = factors_of_layers(around, has_convolutions=tuple(learned) == ALL_WITH_CONVOLUTIONS)
        return Took({OURS: factors}) if factors else Took({}, "all weights are 1", "ignored")

    return {f"network_args.{key}": by(read, OURS) for key in (DOWN, MID, UP, THRESHOLD)}


def factors_of_layers(around: Around, *, has_convolutions: bool) -> dict[str, float]:
    """Patterns of the trained layers whose weight is not 1, with that weight. Raises ValueError as rules do."""
    values = {key: around[f"network_args.{key}"] for key in (DOWN, MID, UP)}
    lengths = [len(str(value).split(",")) for key, value in values.items() if key != MID and "," in str(value)]
    is_sdxl = is_on(around["sdxl"] or False) or lengths[:1] == [PLACES_OF_SDXL]
    places = PLACES_OF_SDXL if is_sdxl else PLACES
    least = number(around[f"network_args.{THRESHOLD}"] or 0.0)
    down, up = (weights(values[key], places, least) for key in (DOWN, UP))
    middle = weights(values[MID], 3 if is_sdxl else 1, least)
    with_text = range(1, 3) if is_sdxl else range(3)  # the down blocks that have attention; the up blocks are as many
    sizes, found = range(places // 3), dict[str, float]()
    for block in sizes:
        kinds = [*(["attentions"] if block in with_text else []), *(["resnets"] if has_convolutions else [])]
        found |= {f"down_blocks.{block}.{kind}.{of}.*": down[3 * block + of + 1] for kind in kinds for of in range(2)}
        if has_convolutions and block < len(sizes) - 1:
            found[f"down_blocks.{block}.downsamplers.*"] = down[3 * block + 3]
    if is_sdxl:
        found["mid_block.attentions.*"] = middle[1]
        if has_convolutions:
            found |= {"mid_block.resnets.0.*": middle[0], "mid_block.resnets.1.*": middle[2]}
    else:
        found["mid_block.*"] = middle[0]
    for block in sizes:
        with_attention = len(sizes) - 1 - block in with_text
        kinds = [*(["attentions"] if with_attention else []), *(["resnets"] if has_convolutions else [])]
        found |= {f"up_blocks.{block}.{kind}.{of}.*": up[3 * block + of] for kind in kinds for of in range(3)}
        if has_convolutions and block < len(sizes) - 1:
            found[f"up_blocks.{block}.upsamplers.*"] = up[3 * block + 2]
    return {pattern: factor for pattern, factor in found.items() if factor != 1.0}


def weights(value: Any, places: int, least: float) -> list[float]:
    """The weights of all places: numbers with commas, missing ones 1, or a curve's name such as `sine+.25`."""
    if value is None:
        return [1.0] * places
    name, _, base = str(value).partition("+")
    if (curve := CURVES.get(name.strip())) is not None:
        found = [curve(place / max(1, places - 1)) + number(base or 0.0) for place in range(places)]
    else:
        found = [number(each.strip() or 0.0) for each in str(value).split(",")]
    return [each if each > least else 0.0 for each in [*found, *[1.0] * places][:places]]
