"""GPU memory of a run's phases besides its training steps: encoding, the LoRA gate, generating images. No torch.

All of them run without gradients, so their memory is weights and a number of values for each pixel, place of the
latents or caption. These numbers were traced on the published models (`phases` of `families/NAME.json`), and are
used for every model of the family. Where a phase does not fit as it is, parts take turns on the GPU and layers of
the denoiser are offloaded: the results are the same, and only time is lost.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.core.families import families
from lora_trainer.core.findings import counted
from lora_trainer.models.folder import places_of_weights, shapes_of_weights
from lora_trainer.models.places import stored_weights

if TYPE_CHECKING:
    from lora_trainer.config.schema import Blocks
    from lora_trainer.models.family import ModelFacts

FRAGMENTATION = 1.05  # of memory that is allocated and freed
PREDICTED_AT_ONCE = 2  # rows of a prediction: with and without the prompt, or two of the gate's forward passes
CAPTIONS_AT_ONCE = 32
DRAWN_AT_ONCE = 8  # on a CPU; on a GPU one, since the decoder's memory grows with each
DECODED_ON_A_CPU = 8 << 30  # bytes, of images that are generated at once there
LARGE_TEXTS = 4 << 30  # bytes of text encoders, above which a CPU holds them as they are stored, mapped
CAPTIONS_ON_A_CPU = 2 << 30  # bytes, of captions that are encoded at once then
TILE = 512  # pixels, side of an image's part that is decoded by itself


@dataclass(frozen=True)
class PhaseCosts:
    """Counts of values. The first three are parameters: of each text encoder, the VAE, the largest layer.

    `encode` and `decode` are held for each pixel at the peak, `predict` for each place of one sample's latents,
    `caption` for each caption.
    """

    text_encoders: tuple[int, ...]
    autoencoder: int
    layer: int
    encode: int
    decode: int
    predict: int
    caption: int
    text_layers: tuple[tuple[int, int, int], ...] = ()  # (layers, width, inner width) of encoders that can be trained


@cache
def phase_costs(family: str) -> PhaseCosts:
    """The published model's."""
    costs = families()[family]["phases"]
    layers = tuple((count, width, inner) for count, width, inner in costs.get("text_layers", ()))
    return PhaseCosts(**{**costs, "text_encoders": tuple(costs["text_encoders"]), "text_layers": layers})


def costs_of(facts: ModelFacts, without: Collection[str] = (), controls: int = 0) -> PhaseCosts:
    """The same, with the sizes of a folder's own encoders, and without those of `without`.

    A caption is longer by its control images, where the text encoder reads them.

    Raises UsageError for weights that cannot be read.
    """
    published = phase_costs(facts.family)
    names = ("text_encoder", *(f"text_encoder_{number}" for number in range(2, len(published.text_encoders) + 1)))
    sizes = zip(names, published.text_encoders, strict=True)
    longer = 1 + controls * facts.control_tokens / facts.caption_tokens
    published = replace(
        published,
        text_encoders=tuple(size for name, size in sizes if name not in without),
        caption=math.ceil(published.caption * longer),
    )
    if not facts.whole or not facts.path.is_dir():
        return published
    text_encoders = sorted(
        path for path in facts.path.glob("text_encoder*") if path.is_dir() and path.name not in without
    )
    own = {path.name: _sizes(path) for path in (*text_encoders, facts.path / "vae")}
    return replace(
        published,
        text_encoders=tuple(sum(own[path.name]) for path in text_encoders),
        autoencoder=sum(own["vae"]),
        layer=max(size for sizes in own.values() for size in sizes),
    )


def held_bytes(facts: ModelFacts, part: str, values: int, dtype: str) -> int:
    """Host memory of a part that is loaded as `dtype`, `F32`, `F16` or `BF16`: weights stored so stay mapped.

    A published model is assumed to store `values` as BF16. Raises UsageError for weights that cannot be read.
    """
    width = 4 if dtype == "F32" else 2
    if not facts.whole or not facts.path.is_dir():
        return 0 if dtype == "BF16" else width * values
    stored = stored_weights(places_of_weights(facts.path / part)).values()
    counts: list[int] = [math.prod(entry["shape"]) for entry in stored if entry["dtype"] != dtype]
    return width * sum(counts)


def _sizes(component: Path) -> list[int]:
    """Values of each weight, from the headers of its files."""
    return [math.prod(shape) for shape in shapes_of_weights(component).values()]


@dataclass(frozen=True)
class Placement:
    """How a phase uses the GPU.

    `resident` bytes of the denoiser stay there and the rest is offloaded layer by layer; None means all stays.
    `in_turn`: text encoders and VAE are offloaded too. `tiled`: images are decoded in parts. `peak` in bytes.
    """

    resident: int | None
    in_turn: bool
    tiled: bool
    peak: int

    @property
    def description(self) -> str:
        """`encoders layer by layer, 3.9 GiB of the denoiser on the GPU and the rest layer by layer`."""
        text = ["encoders layer by layer"] if self.in_turn else []
        if self.resident is not None:
            text.append(f"{self.resident / 2**30:.1f} GiB of the denoiser on the GPU and the rest layer by layer")
        if self.tiled:
            text.append(f"images decoded in parts of {TILE} px")
        return ", ".join(text) or "everything on the GPU"


def place_gate(denoiser: int, places: int, itemsize: int, costs: PhaseCosts, usable: int | None) -> Placement:
    """For predictions on latents of so many `places`; `denoiser` and `usable` in bytes, None without a limit."""
    active = prediction_bytes(places, itemsize, costs)
    if usable is None or denoiser + active <= usable:
        return Placement(None, False, False, denoiser + active)
    resident, peak = _kept(denoiser, active + costs.layer * itemsize, usable)
    return Placement(resident, False, False, peak)


def place_drawing(
    denoiser: int,
    encoders: int,
    places: int,
    pixels: int,
    itemsize: int,
    decoder_itemsize: int,
    costs: PhaseCosts,
    usable: int | None,
) -> Placement:
    """For one image at a time of so many `pixels`. `encoders` are the bytes of text encoders and VAE."""
    predicting, layer = prediction_bytes(places, itemsize, costs), costs.layer * itemsize
    decoding = decoding_bytes(pixels, decoder_itemsize, costs)
    whole = denoiser + encoders + max(predicting, decoding)
    if usable is None or whole <= usable:
        return Placement(None, False, False, whole)
    tiled = decoding + layer > usable
    if tiled:
        decoding = decoding * min(pixels, TILE * TILE) // pixels
    resident, peak = _kept(denoiser, max(predicting, decoding) + layer, usable)
    return Placement(resident, True, tiled, peak)


def drawn_on_a_cpu(pixels: int, itemsize: int, costs: PhaseCosts) -> int:
    """How many images of so many `pixels` are generated at once on a CPU."""
    return max(1, min(DRAWN_AT_ONCE, DECODED_ON_A_CPU // decoding_bytes(pixels, itemsize, costs)))


def decoding_bytes(pixels: int, itemsize: int, costs: PhaseCosts) -> int:
    """Held while an image is decoded, beside the weights."""
    return int(FRAGMENTATION * costs.decode * pixels * itemsize)


def _kept(denoiser: int, active: int, usable: int) -> tuple[int | None, int]:
    """How much of the denoiser stays on the GPU beside the active bytes, None for all of it; and the peak."""
    if denoiser + active <= usable:
        return None, denoiser + active
    resident = max(0, usable - active)
    return resident, resident + active


def prediction_bytes(places: int, itemsize: int, costs: PhaseCosts) -> int:
    """Bytes of a forward pass of the denoiser, beside the weights."""
    return int(FRAGMENTATION * PREDICTED_AT_ONCE * costs.predict * places * itemsize)


def images_at_once(wanted: int, pixels: int, itemsize: int, costs: PhaseCosts, usable: int | None) -> int:
    """How many images of so many `pixels` are encoded together: as many as are `wanted` and fit, at least one."""
    if usable is None:
        return wanted
    each = int(FRAGMENTATION * costs.encode * pixels * itemsize)
    return max(1, min(wanted, (usable - costs.autoencoder * itemsize) // each))


def encoding_bytes(costs: PhaseCosts, itemsize: int = 4) -> tuple[int, int]:
    """(of the VAE, held for each pixel of an image while it encodes); in fp32."""
    return costs.autoencoder * itemsize, math.ceil(FRAGMENTATION * costs.encode * itemsize)


def caching_bytes(images: int, pixels: int, itemsize: int, costs: PhaseCosts, usable: int | None) -> tuple[int, str]:
    """The peak of filling the caches, images first, then captions, each with their own encoders alone; and how.

    Text encoders that do not fit are offloaded layer by layer, with as many captions at once as fit beside them.
    """
    encoding = itemsize * (costs.autoencoder + int(FRAGMENTATION * images * costs.encode * pixels))
    each = _caption_bytes(itemsize, costs)
    images_text = counted(images, "image") + " at once"
    in_turn, together = captions_at_once(itemsize, costs, usable)
    if not in_turn:
        return max(encoding, itemsize * sum(costs.text_encoders) + together * each), images_text
    text = f"{images_text}, text encoders layer by layer, {counted(together, 'caption')} at once"
    return max(encoding, itemsize * costs.layer + together * each), text


def captions_at_once(itemsize: int, costs: PhaseCosts, usable: int | None) -> tuple[bool, int]:
    """Whether text encoders are offloaded layer by layer, and how many captions they encode together."""
    each = _caption_bytes(itemsize, costs)
    if usable is None or itemsize * sum(costs.text_encoders) + CAPTIONS_AT_ONCE * each <= usable:
        return False, CAPTIONS_AT_ONCE
    return True, max(1, min(CAPTIONS_AT_ONCE, (usable - itemsize * costs.layer) // each))


def captions_on_a_cpu(itemsize: int, costs: PhaseCosts) -> tuple[bool, int]:
    """The same on a CPU, for host memory: whether each layer is widened only while it is used.

    That costs a few percent of the time at so many captions at once.
    """
    if not widened_in_turn(itemsize * sum(costs.text_encoders)):
        return False, CAPTIONS_AT_ONCE
    return True, max(1, min(CAPTIONS_AT_ONCE, CAPTIONS_ON_A_CPU // _caption_bytes(itemsize, costs)))


def widened_in_turn(size: int) -> bool:
    """Whether text encoders of so many bytes are not held whole on a CPU."""
    return size > LARGE_TEXTS


def _caption_bytes(itemsize: int, costs: PhaseCosts) -> int:
    """Held for each caption while it is read."""
    return itemsize * math.ceil(FRAGMENTATION * costs.caption)


def count_of(setting: Blocks, blocks: int) -> int:
    """The number of blocks of a setting; `auto`, where nothing was planned, means none."""
    if setting is True:
        return blocks
    return 0 if setting == "auto" else min(int(setting), blocks)


def no_more(setting: Blocks, blocks: int) -> str:
    """The end of a log line where more blocks were requested than there are."""
    more = setting is not True and setting != "auto" and setting > blocks
    return f"; {setting} were requested" if more else ""
