"""Images of every kind, turned into 8-bit RGB pixels as they are seen.

EXIF rotation is applied, colors become sRGB's, transparency is laid on white, 16-bit values
are scaled (not clipped), animations give their first frame.
"""

from __future__ import annotations

import contextlib
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, BinaryIO

import numpy as np
from PIL import Image, UnidentifiedImageError, features
from PIL.PngImagePlugin import PngImageFile

from lora_trainer.data.images.colors import apply_transform, colors_of, conversion_of, scale_key
from lora_trainer.data.images.remote import RemoteError
from lora_trainer.data.images.spans import open_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from lora_trainer.data.buckets import ResizeCrop
    from lora_trainer.data.sample import Colors, Span

JPEG_ENDINGS = (".jpg", ".jpeg", ".jfif", ".jpe", ".pjpeg", ".pjp")
# What is read, wherever images come from. Others of Pillow's formats are rare, have no mark to be known by (TGA), or decoders
# that are attacked most (JPEG 2000): they are named and counted as not read.
ENDINGS_OF_FORMAT: dict[str, tuple[str, ...]] = {
    "PNG": (".png", ".apng"),
    "JPEG": JPEG_ENDINGS,
    "MPO": (*JPEG_ENDINGS, ".mpo"),  # what many phones write: a JPEG with a second image behind it
    "WEBP": (".webp",),
    "BMP": (".bmp",),
    "PPM": (".ppm", ".pgm", ".pbm", ".pnm"),
    "TIFF": (".tif", ".tiff"),
    "GIF": (".gif",),
}
if features.check("avif"):
    ENDINGS_OF_FORMAT["AVIF"] = (".avif",)

READERS = tuple(name for name in ENDINGS_OF_FORMAT if name != "MPO")  # opened as a JPEG first
IMAGE_ENDINGS = tuple(sorted({ending for endings in ENDINGS_OF_FORMAT.values() for ending in endings}))

ORIENTATION_TAG = 0x0112
TIFF_SIGNATURES = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
TIFF_FIX = "Save it with 8 bits, or as gray with 16 bits without a sign, colors side by side (chunky)."
BITS_TAG = 0x0102
PLANAR_TAG, PLANES_APART = 0x011C, 2
SAMPLE_FORMAT_TAG, SIGNED = 0x0153, 2
PHOTOMETRIC_TAG, WHITE_IS_ZERO = 0x0106, 0  # of TIFF; Pillow inverts such images of 8 bits alone
TURNS: dict[int, Image.Transpose] = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
SIDEWAYS = (5, 6, 7, 8)

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
CHUNKS_WITH_WORDS = (b"eXIf", b"tEXt", b"zTXt", b"iTXt")
MOST_CHUNKS = 100_000

# Pillow refuses from twice its own warning limit on; the same number, named.
MOST_PIXELS = 178_956_970


class BrokenImageError(Exception):
    """An image that cannot be read. `code` is the finding's code."""

    def __init__(self, code: str, message: str, fix: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.fix = fix


@dataclass(frozen=True)
class Header:
    """The header of an image, read without decoding pixels. Sizes as seen, in pixels."""

    width: int
    height: int
    format: str  # Pillow's name: "PNG", "JPEG", …
    frames: int  # more than 1 means animated or several pages
    colors: Colors
    has_alpha: bool  # transparency, whether or not any pixel uses it


@contextlib.contextmanager
def quiet_pillow() -> Iterator[None]:
    """Silence Pillow's warnings of odd metadata and of large images; the checks report both."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def opened(place: Path | BinaryIO, span: Span | None = None) -> Iterator[Image.Image]:
    """An open image, from its file, inside of a larger file where `span` says, or from bytes at hand;
    whatever a damaged one makes Pillow raise becomes `BrokenImageError`. Raises RemoteError, too."""
    try:
        with quiet_pillow(), contextlib.ExitStack() as stack:
            file = stack.enter_context(open_bytes(place, span)) if isinstance(place, Path) else place
            first = file.read(4)
            empty = not first
            file.seek(0)
            image = stack.enter_context(Image.open(file, formats=READERS))
            if image.width * image.height > MOST_PIXELS:
                raise Image.DecompressionBombError
            scale_key(image)
            forget_xmp(image)
            _refuse_misread_tiff(image)
            yield image
    except (BrokenImageError, RemoteError):  # a server that is away damages no image
        raise
    except Image.DecompressionBombError as error:
        message = f"is larger than {MOST_PIXELS:,} pixels, which no training needs and which can exhaust memory."
        raise BrokenImageError("too_large", message, "Scale it down or remove it.") from error
    except UnidentifiedImageError as error:
        message = "is empty (0 bytes)." if empty else "is not an image in a known format."
        if first in TIFF_SIGNATURES:
            message = "is a TIFF of a kind that is not read."
            raise BrokenImageError("unreadable", message, TIFF_FIX) from error
        raise BrokenImageError("unreadable", message, "Replace or remove it.") from error
    # Damaged files reach Pillow's parsers in every state: no narrower list is complete.
    except Exception as error:
        raise unreadable(error) from error


def _refuse_misread_tiff(image: Image.Image) -> None:
    """Raise BrokenImageError for TIFFs of which Pillow makes other pixels than they hold, without a word."""
    if image.format != "TIFF":
        return
    tags = image.tag_v2  # type: ignore[attr-defined]
    bits = max(tags.get(BITS_TAG, (1,)))
    kind = ""
    if tags.get(PLANAR_TAG) == PLANES_APART and bits > 8 and len(image.getbands()) > 1:
        kind = f"with planes of {bits} bits for each color"
    if SIGNED in tags.get(SAMPLE_FORMAT_TAG, ()):
        kind = f"with {bits} bits and a sign, whose black and white nobody states"
    if kind:
        raise BrokenImageError("unreadable", f"is a TIFF {kind}, which is not read.", TIFF_FIX)


def unreadable(error: Exception) -> BrokenImageError:
    """The error of reading a damaged or locked file, as a finding."""
    return BrokenImageError("unreadable", f"cannot be read ({_reason(error)}).", "Replace or remove it.")


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error).split("\n")[0] or type(error).__name__


def header_of(place: Path | BinaryIO, span: Span | None = None) -> Header:
    """Size after EXIF rotation, format, frames and what is said about colors, without decoding the pixels.

    Raises BrokenImageError.
    """
    with opened(place, span) as image:
        width, height = image.size
        # Pillow turns TIFF files itself while loading, and says so in their size already.
        if image.format != "TIFF" and orientation_of(image) in SIDEWAYS:
            width, height = height, width
        frames = 1 if image.format == "MPO" else int(getattr(image, "n_frames", 1))
        return Header(width, height, image.format or "", frames, colors_of(image), image.has_transparency_data)


def read_header(path: Path, span: Span | None = None) -> tuple[int, int]:
    """(width, height) as the image is seen. Raises BrokenImageError."""
    header = header_of(path, span)
    return header.width, header.height


def orientation_of(image: Image.Image) -> int:
    """The EXIF orientation, 1 when there is none or it cannot be read. One that XMP alone states does not count: browsers,
    ImageMagick, libvips and OpenCV ignore it, and Pillow does not."""
    try:
        if isinstance(image, PngImageFile) and image.fp is not None and has_words_after_pixels(image.fp):
            image.load()
        forget_xmp(image)
        return int(Image.Image.getexif(image).get(ORIENTATION_TAG, 1))
    except Exception:  # noqa: BLE001 - damaged metadata must not cost a good image
        return 1


def forget_xmp(image: Image.Image) -> None:
    """Leave out XMP, whose orientation Pillow would follow: of a TIFF while it is loaded."""
    for key in ("xmp", "XML:com.adobe.xmp"):
        image.info.pop(key, None)


def png_chunks(file: IO[bytes]) -> Iterator[tuple[bytes, int]]:
    """Name and length of each chunk of a PNG; the file is then at the chunk's content, and in the end where it was."""
    place, at = file.tell(), len(PNG_SIGNATURE)
    try:
        for _ in range(MOST_CHUNKS):
            file.seek(at)
            head = file.read(8)
            if len(head) < 8:
                return
            length = int.from_bytes(head[:4])
            yield head[4:], length
            at += 12 + length  # length, name, content, checksum
    finally:
        file.seek(place)


def has_words_after_pixels(file: IO[bytes]) -> bool:
    """Whether a PNG has EXIF or text behind its pixels, where Pillow looks for a turn by decoding all of them."""
    names = [name for name, _ in png_chunks(file)]
    return len(names) == MOST_CHUNKS or any(name in CHUNKS_WITH_WORDS for name in names[names.index(b"IDAT") :])


def refuse_damaged_pixels(image: Image.Image) -> None:
    """Raise BrokenImageError where a checksum of a PNG's pixels is wrong: Pillow reads on, and shows other pixels."""
    if not isinstance(image, PngImageFile) or image.fp is None:
        return
    for name, length in png_chunks(image.fp):
        if name == b"IDAT":
            found = zlib.crc32(name)
            while length and (part := image.fp.read(min(length, 2**20))):
                found, length = zlib.crc32(part, found), length - len(part)
            if len(stored := image.fp.read(4)) == 4 and stored != found.to_bytes(4):  # Pillow finds what is cut off
                raise BrokenImageError("unreadable", "has a wrong checksum.", "Replace or remove it.")


def load_rgb(path: Path, span: Span | None = None) -> Image.Image:
    """The whole image as 8-bit RGB, as it is seen. Raises BrokenImageError."""
    return load_image(path, span, to_rgb)


def load_alpha(path: Path, span: Span | None = None) -> Image.Image:
    """The image's opacity as gray, as it is seen: white where it covers. Raises BrokenImageError."""
    return load_image(path, span, lambda image: alpha_of(image) or Image.new("L", image.size, 255))


def load_image(path: Path, span: Span | None, convert: Callable[[Image.Image], Image.Image]) -> Image.Image:
    """The whole image as `convert` reads it, turned as it is seen. Raises BrokenImageError."""
    with opened(path, span) as image:
        turn = None if image.format == "TIFF" else TURNS.get(orientation_of(image))
        image.load()
        flat = convert(image)
        return flat.transpose(turn) if turn is not None else flat


def to_rgb(image: Image.Image) -> Image.Image:
    """Any Pillow mode as RGB in sRGB's colors, transparency laid on white."""
    seen = to_srgb(image)
    if seen.mode == "RGB":
        return seen
    white = Image.new("RGBA", seen.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, seen).convert("RGB")


def to_srgb(image: Image.Image) -> Image.Image:
    """Any Pillow mode as RGB in sRGB's colors, or as RGBA where it has transparency."""
    conversion = conversion_of(image)
    if conversion.transform is None and not is_deep(image):
        flat = image.convert("RGBA" if image.has_transparency_data else "RGB")
    else:
        # Neither littleCMS nor Pillow's 16 bits have opacity beside the colors.
        alpha = alpha_of(image)
        flat = Image.fromarray(deep_levels(image)) if is_deep(image) else image
        if conversion.transform is None:
            flat = flat.convert("RGB")
        else:
            flat = apply_transform(flat.convert(conversion.mode), conversion.transform)
        if alpha is not None:
            flat.putalpha(alpha)
    # Pillow would save it with these pixels, which are sRGB's.
    flat.info.pop("icc_profile", None)
    return flat


def alpha_of(image: Image.Image) -> Image.Image | None:
    """The opacity of an image as gray; None for one without transparency."""
    if not image.has_transparency_data:
        return None
    if is_deep(image):
        clear = np.asarray(image) == image.info["transparency"]
        return Image.fromarray(np.where(clear, 0, 255).astype(np.uint8))
    rgba = image if image.mode.endswith("A") else image.convert("RGBA")
    return rgba.getchannel("A")


def is_deep(image: Image.Image) -> bool:
    """Whether an image's gray values have more than 8 bits."""
    return image.mode.startswith("I") or image.mode == "F"


def deep_levels(image: Image.Image) -> NDArray[np.uint8]:
    """The gray of a deep image in 8 bits [H, W], black as 0 whatever its file stores."""
    values = np.asarray(image)
    if image.mode == "I":
        values = values.view(np.uint32)  # Pillow reads 32 bits without a sign into numbers with one
    tags = getattr(image, "tag_v2", {})
    if tags.get(BITS_TAG) == (12,):
        values = np.rint(values * (65535 / 4095)).astype(np.uint16)  # of floats the range would be guessed
    levels = scale_deep(values)
    return 255 - levels if tags.get(PHOTOMETRIC_TAG) == WHITE_IS_ZERO else levels


def scale_deep(values: NDArray[np.generic]) -> NDArray[np.uint8]:
    """Gray values [H, W] of 16 or 32 bits or floats, scaled to 8 bits.

    Files do not say which range their 32-bit values use; the smallest usual range that
    holds the largest value is taken.
    """
    deep = np.nan_to_num(values.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)
    peak = float(deep.max(initial=0.0))
    ranges = (1.0, 255.0, 65535.0, 2.0**32 - 1) if values.dtype.kind == "f" else (65535.0, 2.0**32 - 1)
    top = next((limit for limit in ranges if peak <= limit), max(peak, 1.0))
    return np.rint(np.clip(deep / top, 0.0, 1.0) * 255.0).astype(np.uint8)


def cut_out(
    image: Image.Image, fit: ResizeCrop, resampling: Image.Resampling = Image.Resampling.LANCZOS
) -> Image.Image:
    """The image resized to cover its bucket, cropped as the fit says; of any size with the fit's aspect."""
    # Only what the crop keeps is resized: a sliver of an image would fill the memory otherwise.
    across, down = image.width / fit.resized_width, image.height / fit.resized_height
    box = (
        fit.left * across,
        fit.top * down,
        min((fit.left + fit.bucket.width) * across, image.width),
        min((fit.top + fit.bucket.height) * down, image.height),
    )
    size = (fit.bucket.width, fit.bucket.height)
    return image.resize(size, resampling, box=box)
