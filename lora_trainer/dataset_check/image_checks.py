"""Checks of single images: measures in the image's pixels, related to its bucket."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from lora_trainer.core.findings import Finding, Severity
from lora_trainer.data.buckets import ResizeCrop, has_other_shape
from lora_trainer.data.images.images import ENDINGS_OF_FORMAT, SIDEWAYS
from lora_trainer.data.images.masks import DARK_LEVEL
from lora_trainer.dataset_check.context import Check, CheckContext, beside

if TYPE_CHECKING:
    from lora_trainer.data.images.measures import Seen
    from lora_trainer.data.sample import Sample

UPSCALE_LIMIT, UPSCALE_SEEN = 2.0, 1.1  # enlarged further, an image teaches its own blur; less is not seen
SMALLEST_SIDE = 32  # pixels, the least data.resolution
CROP_LIMIT = 0.5  # less of the image than this is left by the crop
UNIFORM_SPREAD = 2.0  # largest standard deviation of a channel, 0 to 255
BLUR_EDGE = 4.5  # pixels of the bucket that the sharpest edges take; a Gaussian of 1.8 pixels
MOTION_EDGE, MOTION = 6.0, 1.8  # the same along one direction, and how many times as wide as all edges
NOISE_SEEN = 8.0  # gray levels at the size that is trained
PIXELS_SEEN = 1.3  # pixels of the bucket that an enlarged pixel takes
DIM_PEAK = 40  # of 255; night photographs have brighter places
BURNT_AREA, BURNT_COLORS = 0.3, 0.03  # share of the image that is white; of the rest that has a channel at its end
LEAST_QUALITY, LEAST_REDUCED = 30, 20  # of JPEG, 1 to 100; the same where it is reduced to between half and a quarter
BLOCK_STEPS = 2.0  # gray levels by which the mean step on JPEG's grid is larger than beside it
BLOCK_SCALE = 0.5  # reduced further, blocks of 8 pixels are not seen any more
BORDER_AREA = 0.03  # share of the image
FRAME_SIDE = 0.15  # a frame broader than this share of the side may be the background of something square
TRANSPARENT_AREA = 0.01
BLACK, WHITE, FLAT_SPREAD = 2, 253, 0.5  # gray levels, 0 to 255
VARIED_THUMB, SAME_THUMB = 48, 6  # gray levels between cells of 8×8 of a mask; and from those of its image
DARK_PEAK = 64  # of 255; what no lamp and no sky of 16 bits stays below
NO_MASK_CODES = ("colored_mask", "label_mask")
OUTLINE_SEEN = 0.5  # of an outline on white; less is lost

READING_CODES = frozenset(
    {
        "unreadable",
        "too_large",
        "damaged_tar",
        "two_images",
        "not_downloaded",
        "numbered_folder",
        "mixed_folders",
        "side_folder",
        "reg_folder",
        "split_folders",
        "missing_mask",
        "two_masks",
        "shared_mask",
        "orphan_mask",
        "orphan_control",
        "mask_differs",
        "unreadable_mask",
        "missing_control",
        "two_controls",
        "shared_control",
        "unreadable_control",
        "identical_control",
        "swapped_control",
        "control_differs",
    }
)


def of_each(judge: Callable[[CheckContext, Sample, ResizeCrop, Seen], Iterator[Finding]]) -> Check:
    """A check that examines every decoded image by itself."""

    @functools.wraps(judge)
    def check(context: CheckContext) -> list[Finding]:
        everything = zip(context.samples, context.fits, context.seen, strict=True)
        return [
            each
            for sample, fit, seen in everything
            if seen.broken is None
            for each in judge(context, sample, fit, seen)
        ]

    return check


def finding_of(sample: Sample, code: str, severity: Severity, message: str, fix: str) -> Finding:
    return Finding(code, severity, message, fix, path=sample.path)


def check_readable(context: CheckContext) -> list[Finding]:
    """Files that could not be read, from the listing or by the full decode."""
    found = [finding for finding in context.read_findings if finding.code in READING_CODES]
    found += [finding for finding in context.read_findings if finding.code == "foreign_format"]
    for sample, seen in zip(context.samples, context.seen, strict=True):
        if seen.broken is not None:
            code, message, fix = seen.broken
            found.append(finding_of(sample, code, "error", message, fix))
    return found


def check_sizes(context: CheckContext) -> list[Finding]:
    """Images that their bucket enlarges, or cuts down to little."""
    found = _sizes(context)
    if (side := _side_that_fits(context)) is None:
        return found
    fix = f"--set data.resolution={side} or --set data.allow_small_images=true, or replace them by larger ones."
    return [replace(each, fix=fix) if each.code == "too_small" else each for each in found]


def _side_that_fits(context: CheckContext) -> int | None:
    """The resolution at which the smallest is not enlarged, where all are far too small for theirs; None elsewhere."""
    if context.allow_upscale or not context.samples:
        return None
    least = math.inf
    for sample, fit in zip(context.samples, context.fits, strict=True):
        factor = fit.scale_from(sample.width, sample.height)
        if factor <= UPSCALE_LIMIT:
            return None
        step = context.framings[sample.source].step
        least = min(least, math.sqrt(fit.bucket.width * fit.bucket.height) / factor // step * step)
    return int(least) if least >= SMALLEST_SIDE else None


@of_each
def _sizes(context: CheckContext, sample: Sample, fit: ResizeCrop, seen: Seen) -> Iterator[Finding]:
    factor = fit.scale_from(sample.width, sample.height)
    size = f"{sample.width}×{sample.height}"
    framing = context.framings[sample.source]
    if framing.no_upscale and min(sample.width, sample.height) < framing.step:
        message = (
            f"is {size}; a bucket's sides are at least {framing.step} px, and data.bucket_no_upscale enlarges nothing."
        )
        fix = "Remove such images, or --set data.bucket_no_upscale=false."
        yield finding_of(sample, "too_small", "error", message, fix)
    elif factor > 1.0:
        message = f"is {size}, smaller than {fit.bucket}; enlarged {factor:.2f} times."
        fix = "Replace it with a larger one, remove it, or set data.resolution lower."
        if factor > UPSCALE_LIMIT and not context.allow_upscale:
            fix = "Remove such images, set data.resolution lower, or --set data.allow_small_images=true."
            yield finding_of(sample, "too_small", "error", message, fix)
        else:
            yield finding_of(sample, "upscaled", "warning" if factor > UPSCALE_SEEN else "note", message, fix)
    if fit.kept < CROP_LIMIT:
        message = f"is {size}; the crop to {fit.bucket} keeps {fit.kept:.0%} of it."
        fix = "Crop it by hand, or set data.max_aspect higher."
        yield finding_of(sample, "cropped", "warning", message, fix)


def check_distinct(context: CheckContext) -> list[Finding]:
    """The same bytes in two files."""
    first: dict[str, Sample] = {}
    found = []
    for sample in context.samples:
        original = first.setdefault(sample.content, sample)
        # The same image in two sources is one that is trained twice on purpose.
        if original is not sample and (original.path, original.span) != (sample.path, sample.span):
            message = f"is the same file as {beside(original.path, sample.path)}."
            fix = "Remove one; to weigh images use folders such as 10_name."
            found.append(finding_of(sample, "duplicate", "warning", message, fix))
    return found


@of_each
def check_contents(context: CheckContext, sample: Sample, fit: ResizeCrop, seen: Seen) -> Iterator[Finding]:
    """Images that show nothing or several things side by side, images with holes, and masks that let nothing through."""
    if seen.collage == "panels":
        message = "is several images side by side, divided by a straight line."
        yield finding_of(sample, "collage", "warning", message, "Cut it into single images, each with its caption.")
    elif seen.collage:
        message = "is divided by a straight line: it may be two images side by side."
        fix = "If it is, cut it into single images; the edge of a wall is no reason."
        yield finding_of(sample, "collage", "note", message, fix)
    if seen.has_status_bar:
        message = "begins with a phone's status bar: it seems to be a screenshot."
        yield finding_of(sample, "screenshot", "warning", message, "Cut out the image that it shows, or remove it.")
    if seen.spread < UNIFORM_SPREAD:
        message = f"is nearly one color (spread {seen.spread:.1f} of 255)."
        fix = "Remove it unless it is meant."
        if seen.transparent > TRANSPARENT_AREA and sample.mask is None:
            message = "is nearly one color on white, which its transparency is laid on."
            fix = "Lay it on a background of another color."
        yield finding_of(sample, "uniform", "warning", message, fix)
    if seen.transparent > TRANSPARENT_AREA and sample.mask is None:
        message = f"is {seen.transparent:.0%} transparent, and is laid on white."
        fix = 'Lay it on the background that is meant, or learn the rest alone: masks = "alpha" in the [[data.sources]] of a --config file.'
        yield finding_of(sample, "transparent", "note", message, fix)
    if seen.outline < OUTLINE_SEEN and sample.mask is None:
        message = f"shows {seen.outline:.0%} of its outline: the rest is white, and transparency is laid on white."
        fix = "Lay it on a background of another color, unless it is meant, as a sticker's white edge is."
        yield finding_of(sample, "white_on_white", "note", message, fix)
    yield from _of_mask(context, sample, seen)


# What is wrong with a mask, by its code: how bad it is, the message and the fix.
MASK_FINDINGS: dict[str, tuple[Severity, str, str]] = {
    "ambiguous_mask": (
        "warning",
        "has a mask whose opacity and colors could both be meant; its opacity is used.",
        "Save it as gray without transparency. What ComfyUI writes (clipspace) is transparent where it was painted.",
    ),
    "photo_mask": (
        "warning",
        "has a mask that is an image itself: it counts where that is bright.",
        "Name the folder of masks: white where the image counts, black elsewhere.",
    ),
    "dark_mask": (
        "note",
        "has a mask whose brightest value is {brightest} of 255. It counts like white there: a loss is divided by its mask.",
        "If these are numbers of classes, paint white (255) what is to be learned.",
    ),
    "turned_mask": (
        "note",
        "has an EXIF orientation that its mask has not, or otherwise; both ways fit its shape.",
        "See that the mask covers the image as it is seen: what EXIF says is applied to both.",
    ),
    "black_mask": (
        "warning",
        "has a mask that is black everywhere, or nearly so.",
        "Paint white (255) what is to be learned, or remove the image.",
    ),
    "cut_off": (
        "warning",
        "has a mask that ends in the middle of a row, black after that: its end may be missing.",
        "If it is cut off, copy or download it again.",
    ),
    "white_mask": (
        "warning",
        "has a mask that is white everywhere: all of it is trained on.",
        "Paint black what is not to be learned, or move the image to a source without masks.",
    ),
}


def _of_mask(context: CheckContext, sample: Sample, seen: Seen) -> Iterator[Finding]:
    """A mask that cannot be decoded, leaves nothing to learn, leaves nothing out, or is doubtful."""
    if sample.mask is None:
        return
    mask = context.masks.get(sample.mask.content)
    if mask is not None and mask.broken is not None:
        code, message, fix = mask.broken
        code = code if code in NO_MASK_CODES else "unreadable_mask"
        yield finding_of(sample, code, "error", f"has a mask that {message}", fix)
        return
    levels = seen.alpha if mask is None else mask.alpha
    if levels is None:  # not decoded
        return
    codes = [] if mask is None else _doubts_of(mask, sample, seen)
    if mask is None and levels[0] < levels[1] and BLACK < levels[1] < DARK_LEVEL:
        codes.append("dark_mask")
    if mask is not None and mask.spread < FLAT_SPREAD:
        levels = (min(mask.thumb), max(mask.thumb))
    if levels[1] <= BLACK:
        codes.append("black_mask")
    if levels[0] >= WHITE:
        codes.append("white_mask")
    for code in codes:
        severity, message, fix = MASK_FINDINGS[code]
        yield finding_of(sample, code, severity, message.format(brightest=levels[1]), fix)


def _doubts_of(mask: Seen, sample: Sample, seen: Seen) -> list[str]:
    """The codes of what is doubtful about a mask's file, by itself and beside its image."""
    codes: list[str] = [mask.doubt] if mask.doubt else []
    if mask.may_be_cut:
        codes.append("cut_off")
    # The image itself in gray, by the 8×8 copies of both.
    colors = np.frombuffer(seen.thumb, dtype=np.uint8).reshape(1, -1, 3)
    gray = np.asarray(Image.fromarray(colors).convert("L"), dtype=np.int16)[0]
    own = np.frombuffer(mask.thumb, dtype=np.uint8).reshape(-1, 3)[:, 0].astype(np.int16)
    if not mask.doubt and np.ptp(own) > VARIED_THUMB and np.abs(own - gray).max() <= SAME_THUMB:
        codes.append("photo_mask")
    if mask.turn != seen.turn:
        is_square = not has_other_shape((sample.width, sample.height), (sample.height, sample.width))
        if is_square or (mask.turn in SIDEWAYS) == (seen.turn in SIDEWAYS):
            codes.append("turned_mask")
    return codes


@of_each
def check_sharpness(context: CheckContext, sample: Sample, fit: ResizeCrop, seen: Seen) -> Iterator[Finding]:
    """Images whose sharpest edges are soft even at the size that is trained, as a whole or along one direction."""
    scale = min(1.0, fit.scale_from(sample.width, sample.height))
    edge, smear = seen.edge * scale, seen.smear * scale
    fix = "Replace it with a sharp one, remove it, or train at a lower resolution."
    if edge > BLUR_EDGE:
        message = f"is blurred: its sharpest edges are {edge:.1f} pixels wide at {fit.bucket}."
        yield finding_of(sample, "blurred", "warning", message, fix)
    elif smear > max(MOTION_EDGE, MOTION * edge):
        message = (
            f"is blurred by motion: along one direction its sharpest edges are {smear:.1f} pixels wide at {fit.bucket}."
        )
        yield finding_of(sample, "motion_blur", "warning", message, fix)


@of_each
def check_pixels(context: CheckContext, sample: Sample, fit: ResizeCrop, seen: Seen) -> Iterator[Finding]:
    """Noise, enlarged pixels, colors of few levels, and too little or too much light."""
    scale = min(1.0, fit.scale_from(sample.width, sample.height))
    fix = "Replace it with a better copy, or remove it."
    if seen.noise * scale > NOISE_SEEN:
        message = f"is noisy: by {seen.noise * scale:.0f} gray levels at {fit.bucket}."
        yield finding_of(sample, "noisy", "warning", message, fix)
    if seen.pixel_side * scale > PIXELS_SEEN:
        message = f"was enlarged without smoothing: each of its pixels is {seen.pixel_side:.1f} pixels wide."
        yield finding_of(sample, "pixelated", "warning", message, fix)
    if seen.has_few_levels:
        yield finding_of(sample, "posterized", "warning", "has only four levels in each color channel.", fix)
    if seen.peak < DIM_PEAK and seen.spread >= UNIFORM_SPREAD:
        message = f"is nearly black: its brightest places have {seen.peak} of 255."
        yield finding_of(sample, "underexposed", "warning", message, fix)
    if seen.burnt >= BURNT_AREA and seen.transparent <= TRANSPARENT_AREA:  # which is laid on white
        sure = seen.clipped >= BURNT_COLORS
        message = f"is burnt out: {seen.burnt:.0%} of it are white, without a background that is."
        if not sure:
            message = f"has {seen.burnt:.0%} of pure white, softly bordered: overexposed, or a bright background."
        yield finding_of(sample, "overexposed", "warning" if sure else "note", message, fix)


@of_each
def check_compression(context: CheckContext, sample: Sample, fit: ResizeCrop, seen: Seen) -> Iterator[Finding]:
    """JPEG's blocks, where so little is reduced that they are learned."""
    scale = fit.scale_from(sample.width, sample.height)
    least = LEAST_QUALITY if scale > BLOCK_SCALE else LEAST_REDUCED
    message = ""
    if seen.quality < least and scale > BLOCK_SCALE / 2:
        message = f"is compressed too far (JPEG quality {seen.quality})."
    elif seen.blocks > BLOCK_STEPS and scale > BLOCK_SCALE:
        message = (
            f"shows blocks of 8 pixels (steps of {seen.blocks:.1f} levels), as too strong JPEG compression leaves them."
        )
    if message:
        fix = "Replace it with a better copy; saving it again does not help."
        yield finding_of(sample, "over_compressed", "warning", message, fix)


@of_each
def check_borders(context: CheckContext, sample: Sample, fit: ResizeCrop, seen: Seen) -> Iterator[Finding]:
    """Letterboxes and frames, which would be learned as part of the subject."""
    borders = seen.borders
    sides = {"left": borders.left, "top": borders.top, "right": borders.right, "bottom": borders.bottom}
    left = (1.0 - borders.left - borders.right) * (1.0 - borders.top - borders.bottom)
    if 1.0 - left < BORDER_AREA:
        return
    named = ", ".join(f"{name} {share:.0%}" for name, share in sides.items() if share)
    broad = all(sides.values()) and max(sides.values()) > FRAME_SIDE
    message = f"has a border of one color ({named})."
    fix = "Leave it if it belongs to the image, else cut it off." if broad else "Cut it off."
    yield finding_of(sample, "border", "note" if broad else "warning", message, fix)


@of_each
def check_formats(context: CheckContext, sample: Sample, fit: ResizeCrop, seen: Seen) -> Iterator[Finding]:
    """Animations, an end that may be missing, colors that are not understood, and endings that are not the format's."""
    if seen.frames > 1:
        message = f"has {seen.frames} frames; only the first is used."
        yield finding_of(sample, "animated", "note", message, "Save the frame that is meant.")
    if seen.deep_peak < DARK_PEAK:
        message = (
            f"stores 16 bits of which its brightest value uses {(seen.deep_peak + 1) / 256:.0%}, as data of 10 or 12 bits do: it"
            " is trained nearly black."
        )
        fix = "Multiply its values, by 16 for 12 bits, and save it again; leave it if it is meant to be dark."
        yield finding_of(sample, "dark_depth", "warning", message, fix)
    if seen.may_be_cut:
        message = "ends in the middle of a row, and all after that is black: its end may be missing."
        fix = "If it is cut off, copy or download it again; leave it if it is drawn so."
        yield finding_of(sample, "cut_off", "warning", message, fix)
    if seen.colors == "damaged":
        message = "has a color profile that cannot be used; its colors are trained as sRGB's."
        yield finding_of(sample, "damaged_profile", "note", message, "Save it again as sRGB, if its colors look wrong.")
    if seen.format and sample.path.suffix.lower() not in ENDINGS_OF_FORMAT.get(seen.format, ()):
        message = f"is a {seen.format} file, whatever its ending says."
        yield finding_of(sample, "wrong_ending", "note", message, "Rename it.")
