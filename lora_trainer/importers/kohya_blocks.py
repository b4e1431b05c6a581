"""kohya's learning rates, ranks and alphas of blocks and of convolutions as patterns of layers.

Its scripts number the places of a U-Net: two of the down blocks' and three of the up blocks' in each, and the samplers
between them. Stable Diffusion 1.5 and 2.x have 12 on each side and one in the middle, SDXL 9 and three.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lora_trainer.importers.flow_words import NOT_READ, kohya_family
from lora_trainer.importers.network_kinds import argument
from lora_trainer.importers.reading import Around, KeyRule, Took
from lora_trainer.importers.rules import by, is_on, number, whole
from lora_trainer.importers.words import ALL_WITH_CONVOLUTIONS

DOWN, MID, UP = "down_lr_weight", "mid_lr_weight", "up_lr_weight"
THRESHOLD = "block_lr_zero_threshold"  # weights up to it are 0 there
PLACES, PLACES_OF_SDXL = 12, 9  # on each side
OURS = "optimizer.layer_learning_rates"
RANKS, ALPHAS = "lora.rank_pattern", "lora.alpha_pattern"
CONVOLUTIONS = ("*.resnets.*.conv1", "*.resnets.*.conv2", "*samplers.*.conv")  # of 3x3, which kohya's conv_dim is for
LOCON = ("kohya locon", "lycoris/locon", "locon")  # what the GUI calls networks with convolutions
NUMBERS, NUMBERS_OF_SDXL = 25, 23  # of `block_dims`; SDXL's first and last are of layers that do not learn here
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
    found = by_layers(down, middle, up, has_convolutions=has_convolutions)
    return {pattern: factor for pattern, factor in found.items() if factor != 1.0}


def by_layers(
    down: Sequence[float], middle: Sequence[float], up: Sequence[float], *, has_convolutions: bool
) -> dict[str, float]:
    """The numbers of all places as those of patterns of layers; nine places on a side are SDXL's."""
    places, is_sdxl = len(down), len(down) == PLACES_OF_SDXL
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
    return found


def sizes_of_layers(targets: Callable[[Any, Around], Took]) -> dict[str, KeyRule]:
    """The rules of `conv_dim`, `block_dims` and their alphas, each of which reads all of its kind.

    A block's numbers come first, and of the patterns that match a layer the last one counts.
    """

    def rule(blocks: str, convolutions: str, usual: str, ours: str) -> KeyRule:
        def read(value: Any, around: Around) -> Took:
            if kohya_family(around):
                return Took({}, NOT_READ, "ignored")
            if not is_on(value):
                return Took({}, "not set", "ignored")
            module, kind = around["network_module"], whole if ours == RANKS else number
            learned = targets(module, around).settings["lora.target_modules"] if isinstance(module, str) else ()
            is_locon = str(around["LoRA_type"] or "").lower() in LOCON
            has_convolutions = is_locon or tuple(learned) == ALL_WITH_CONVOLUTIONS
            found, why = dict[str, float](), ""
            if is_on(written := argument(around, blocks) or 0):
                found = numbers_of_blocks(str(written), has_convolutions=has_convolutions)
                zeros = [pattern for pattern, each in found.items() if each == 0]
                found = {pattern: kind(each) for pattern, each in found.items() if each}
                why = f"blocks with 0 do not learn there: set {OURS} to 0 for {', '.join(zeros)}" if zeros else ""
            of_convolutions = argument(around, convolutions)
            if has_convolutions and is_on(of_convolutions or 0):
                found |= dict.fromkeys(CONVOLUTIONS, kind(of_convolutions))
            alphas = {}
            if (
                ours == RANKS
                and has_convolutions
                and module == "networks.lora"
                and argument(around, "conv_alpha") is None
            ):
                alphas = {ALPHAS: dict.fromkeys(CONVOLUTIONS, 1.0)}  # its default
            if not found or (not is_on(written) and str(of_convolutions) == str(around[usual])):
                return Took(alphas, f"as {usual}", "mapped")
            return Took({ours: found, **alphas}, why, "changed" if why else "mapped")

        return by(read, f"{RANKS} {ALPHAS}" if ours == RANKS else ours)

    ranks = rule("block_dims", "conv_dim", "network_dim", RANKS)
    alphas = rule("block_alphas", "conv_alpha", "network_alpha", ALPHAS)
    return {
        "network_args.block_dims": ranks,
        "network_args.conv_dim": ranks,
        "network_args.block_alphas": alphas,
        "network_args.conv_alpha": alphas,
    }


def numbers_of_blocks(written: str, *, has_convolutions: bool) -> dict[str, float]:
    """`block_dims` by patterns of layers: down, middle, up. Raises ValueError for another count of numbers."""
    numbers = [number(each.strip()) for each in written.split(",")]
    if len(numbers) == NUMBERS:
        down, middle, up = numbers[:12], numbers[12:13], numbers[13:]
    elif len(numbers) == NUMBERS_OF_SDXL:
        down, middle, up = numbers[1:10], numbers[10:13], numbers[13:22]
    else:
        raise ValueError(f"{NUMBERS} numbers with commas, or {NUMBERS_OF_SDXL} for SDXL")
    return by_layers(down, middle, up, has_convolutions=has_convolutions)


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
