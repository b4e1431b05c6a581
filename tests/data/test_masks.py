"""Masks next to the latents that they weight, and findings about masks and sizes."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter

from lora_trainer.config.schema import SourceSection
from lora_trainer.core.errors import DatasetRefused
from lora_trainer.data.buckets import Bucket, fit_to
from lora_trainer.data.caches.cache import CachePlan, fill_latents, plan_latents
from lora_trainer.data.caches.entries import Store
from lora_trainer.data.images.images import BrokenImageError
from lora_trainer.data.images.masks import doubt_of_mask, load_mask, to_mask
from lora_trainer.data.images.pixels import read_mask
from lora_trainer.data.images.spans import content_of
from lora_trainer.data.loader import masks_of
from lora_trainer.data.manifest import read_manifest
from lora_trainer.data.sample import Mask
from lora_trainer.data.views import Framing, View, views_of
from lora_trainer.dataset_check import DatasetGate, check_dataset
from tests.data.conftest import Draw, noise_image
from tests.data.drawings import photo
from tests.data.profiles import PROPHOTO, gray_profile, rgb_profile
from tests.data.test_cache import encode_image, fill


def test_a_mask_is_cached_in_every_variant_of_its_image(tmp_path: Path, draw: Draw) -> None:
    """Downscaled to the latents. An image without a mask keeps its key and entry."""
    folder, cache = tmp_path / "data", tmp_path / "cache"
    for number in range(3):
        draw(folder / f"{number}.png", seed=number)
    fill(folder, cache)
    half = np.zeros((32, 32), dtype=np.uint8)
    half[:, 16:] = half[:4, :4] = 255
    Image.fromarray(half).save(tmp_path / "mask.png")
    first, *others = read_manifest([folder])[0].samples

    def plan() -> CachePlan:
        mask = Mask(tmp_path / "mask.png", content_of(tmp_path / "mask.png", None))
        samples = [replace(first, mask=mask), *others]
        shown = [(sample, view) for sample in samples for view in views_of(sample, Framing((64,), 16, flip=True))]
        return plan_latents(shown, cache, "vae", torch.float16)

    assert fill_latents(plan(), encode_image, batch=4).reasons == {"mask changed": 1, "new": 3}
    store = Store(cache, "latents")
    entries = [store.read(key) for key in plan().keys]
    expected = torch.zeros(8, 8)
    expected[:, 4:] = expected[0, 0] = 1.0
    assert (entries[0]["mask"][0] - expected).abs().max() < 0.2
    assert torch.equal(entries[1]["mask"], entries[0]["mask"].flip(2))
    assert torch.allclose(entries[1]["mean"], entries[0]["mean"].flip(2), atol=1e-3)
    assert not any("mask" in entry for entry in entries[2:])
    stacked = masks_of(entries[1:3])
    assert stacked is not None
    assert stacked.shape == (2, 1, 8, 8)
    assert (stacked[1] == 1.0).all()
    assert masks_of(entries[2:]) is None
    Image.fromarray(255 - half).save(tmp_path / "mask.png")
    assert fill_latents(plan(), encode_image, batch=4).reasons == {"mask changed": 2}


def test_empty_and_undecodable_masks_are_found(tmp_path: Path, draw: Draw) -> None:
    folder, masks = tmp_path / "data", tmp_path / "masks"
    masks.mkdir()
    speck = np.zeros((300, 300), dtype=np.uint8)
    speck[10:40, 20:50] = 255
    for number, pixels in enumerate((speck, 0 * speck, np.random.default_rng(0).integers(0, 256, (300, 300)))):
        draw(folder / f"{number}.png", 300, 300, seed=number)
        Image.fromarray(pixels.astype(np.uint8)).save(masks / f"{number}.png")
    cut_short = masks / "2.png"
    cut_short.write_bytes(cut_short.read_bytes()[:2000])
    clear = np.zeros((300, 300, 4), dtype=np.uint8)
    Image.fromarray(clear).save(draw(tmp_path / "clear" / "3.png"))
    half = noise_image(300, 300, 4)
    half.putalpha(128)  # counts by half, everywhere
    half.save(draw(tmp_path / "clear" / "4.png"))
    sources = [
        SourceSection(path=str(folder), masks=str(masks)),
        SourceSection(path=str(folder.parent / "clear"), masks="alpha"),
    ]
    manifest, findings = read_manifest(sources)
    report = check_dataset(manifest, findings, DatasetGate([Framing((256,), 64)] * 2))
    of_masks = {
        (each.path.name, each.code, each.severity) for each in report.findings if each.path and "mask" in each.code
    }
    assert of_masks == {
        ("1.png", "black_mask", "warning"),
        ("2.png", "unreadable_mask", "error"),
        ("3.png", "black_mask", "warning"),
    }


# What a mask's file means, by whatever way it came: its opacity where that varies, else its gray

SIDE = 48
SHOWN = np.zeros((SIDE, SIDE), dtype=np.uint8)
SHOWN[12:36, 12:36] = 255  # what counts


def layers(color: int | Image.Image, opacity: int | np.ndarray, mode: str = "RGBA") -> Image.Image:
    image = color if isinstance(color, Image.Image) else Image.new("RGB", (SIDE, SIDE), (color,) * 3)
    image = image.copy()
    image.putalpha(Image.fromarray(opacity) if isinstance(opacity, np.ndarray) else opacity)
    return image.convert(mode)


def with_key(image: Image.Image, key: int) -> Image.Image:
    image.info["transparency"] = key
    return image


def palette(opacity: bytes | None) -> Image.Image:
    """Indices 0 outside and 1 inside, gray 0 and 255 of the palette; with `opacity` both of one color."""
    image = Image.fromarray(SHOWN // 255).convert("P")
    image.putpalette([9, 9, 9, 9, 9, 9] if opacity else [0, 0, 0, 255, 255, 255])
    if opacity:
        image.info["transparency"] = opacity
    return image


SCENE = noise_image(SIDE, SIDE, 7)
MASKS: dict[str, Callable[[], Image.Image]] = {
    "white on nothing": lambda: layers(255, SHOWN),
    "black on nothing": lambda: layers(0, SHOWN),
    "cut-out": lambda: layers(SCENE, SHOWN),
    "gray with opacity": lambda: layers(100, SHOWN, "LA"),
    "palette with opacity": lambda: palette(b"\0\xff"),
    "gray with a transparent level": lambda: with_key(Image.fromarray(SHOWN), 0),
    "deep with a transparent level": lambda: with_key(Image.fromarray(SHOWN.astype(np.uint16) + 7), 7),
    "gray": lambda: Image.fromarray(SHOWN),
    "colors": lambda: Image.fromarray(SHOWN).convert("RGB"),
    "opaque": lambda: layers(Image.fromarray(SHOWN).convert("RGB"), 255),
    "opaque gray": lambda: layers(Image.fromarray(SHOWN).convert("RGB"), 255, "LA"),
    "half opaque everywhere": lambda: layers(Image.fromarray(SHOWN).convert("RGB"), 128),
    "opaque but for rounding": lambda: layers(Image.fromarray(SHOWN).convert("RGB"), 254 + SHOWN // 255),
    "one bit": lambda: Image.fromarray(SHOWN).convert("1"),
    "sixteen bits": lambda: Image.fromarray(SHOWN.astype(np.uint16) * 257),
    "palette": lambda: palette(None),
}


@pytest.mark.parametrize("name", MASKS)
def test_what_a_mask_means(tmp_path: Path, name: str) -> None:
    for ending in ("png", "webp", "tiff") if MASKS[name]().mode in ("RGB", "RGBA") else ("png",):
        path = tmp_path / f"mask.{ending}"
        MASKS[name]().save(path, **({"lossless": True, "exact": True} if ending == "webp" else {}))
        assert (np.asarray(load_mask(path)) == SHOWN).all(), ending
        assert load_mask(path).info == {}  # a profile left in it would be applied to what is measured


def test_profiles_do_not_change_masks(tmp_path: Path) -> None:
    levels = Image.fromarray(np.arange(256, dtype=np.uint8)[None])
    levels.save(tmp_path / "gray.png", icc_profile=gray_profile(1.0))
    levels.convert("RGB").save(tmp_path / "color.png", icc_profile=rgb_profile(PROPHOTO))
    for name in ("gray.png", "color.png"):
        assert np.asarray(load_mask(tmp_path / name)).ravel().tolist() == list(range(256))


@pytest.mark.parametrize("kind", ["folder", "tar", "table", "beside"])
@pytest.mark.parametrize("name", ["white on nothing", "cut-out", "opaque"])
def test_masks_mean_the_same_in_every_source(tmp_path: Path, draw: Draw, name: str, kind: str) -> None:
    images = tmp_path / "images"
    draw(images / "a.png", SIDE, SIDE, seed=1)
    place = images / "a-masklabel.png" if kind == "beside" else tmp_path / "masks" / "a.png"
    place.parent.mkdir(exist_ok=True)
    MASKS[name]().save(place)
    data = images
    if kind == "tar":
        data = tmp_path / "a.tar"
        with tarfile.open(data, "w") as tar:
            tar.add(images / "a.png", "a.png")
            tar.add(images / "a.txt", "a.txt")
    if kind == "table":
        data = images / "table.jsonl"
        data.write_text(json.dumps({"file_name": "a.png", "text": "a thing"}), "utf-8")
    (sample,) = read_manifest([SourceSection(path=str(data), masks=str(place.parent))])[0].samples
    mask = read_mask(sample, View(fit_to(SIDE, SIDE, Bucket(SIDE, SIDE))))
    assert mask is not None
    assert torch.equal(mask[0], torch.from_numpy(SHOWN / 255.0).float())


def test_masks_that_leave_nothing_out_are_found(tmp_path: Path, draw: Draw) -> None:
    """As files, by opacity or by gray, and as the image's own transparency that nothing uses."""
    folder, masks, own = tmp_path / "data", tmp_path / "masks", tmp_path / "own"
    masks.mkdir()
    own.mkdir()
    white = {"gray": layers(255, 255).convert("L"), "opaque": layers(255, 255), "one_bit": Image.new("1", (48, 48), 1)}
    other = {name: MASKS[name.replace("_", " ")]() for name in ("white_on_nothing", "cut-out", "gray", "palette")}
    for seed, (name, mask) in enumerate({**white, **{f"{name}_good": mask for name, mask in other.items()}}.items()):
        draw(folder / f"{name}.png", SIDE, SIDE, seed=seed)
        mask.save(masks / f"{name}.png")
    for name, opacity in {"own": 255, "own_good": SHOWN}.items():
        layers(noise_image(SIDE, SIDE, 20 + len(name)), opacity).save(own / f"{name}.png")
        (own / f"{name}.txt").write_text("a thing", "utf-8")
    sources = [
        SourceSection(path=str(folder), masks=str(masks)),
        SourceSection(path=str(own), masks="alpha"),
    ]
    manifest, findings = read_manifest(sources)
    report = check_dataset(manifest, findings, DatasetGate([Framing((48,), 16)] * 2))
    of_masks = {
        (each.path.stem, each.code, each.severity) for each in report.findings if each.path and "_mask" in each.code
    }
    # A cut-out whose background is still there below its transparency may be meant the other way, as ComfyUI writes it.
    hidden = {("cut-out_good", "ambiguous_mask", "warning")}
    assert of_masks == hidden | {(name, "white_mask", "warning") for name in (*white, "own")}


def test_a_subject_that_is_white_on_nothing_is_found(tmp_path: Path) -> None:
    """Laid on white, its outline is lost. A mask says that the transparent part does not count."""
    folder = tmp_path / "data"
    folder.mkdir()
    inner = np.zeros((SIDE, SIDE), dtype=np.uint8)
    inner[18:30, 18:30] = 1
    for name, (edge, middle) in {"ghost": (255, 90), "bear": (60, 255), "egg": (240, 240)}.items():
        colors = np.where(inner == 1, middle, edge).astype(np.uint8)
        layers(Image.fromarray(colors).convert("RGB"), SHOWN).save(folder / f"{name}.png")
        (folder / f"{name}.txt").write_text(f"the {name}", "utf-8")

    def found(**options: str) -> set[tuple[str, str]]:
        manifest, findings = read_manifest([SourceSection(path=str(folder), **options)])
        report = check_dataset(manifest, findings, DatasetGate([Framing((48,), 16)]))
        return {
            (each.path.stem, each.severity) for each in report.findings if each.path and each.code == "white_on_white"
        }

    assert found() == {("ghost", "note"), ("egg", "note")}
    assert found(masks="alpha") == set()


# Masks that mean what was painted, however they were made

WIDE = 128


def disk(blur: float = 0.0, levels: tuple[int, int] = (0, 255), scale: int = 1) -> Image.Image:
    side = WIDE * scale
    yy, xx = np.mgrid[0:side, 0:side]
    inside = (xx - side / 2) ** 2 + (yy - side / 2) ** 2 < (side / 3) ** 2
    mask = Image.fromarray(np.where(inside, levels[1], levels[0]).astype(np.uint8))
    return mask.resize((WIDE, WIDE), Image.Resampling.LANCZOS).filter(ImageFilter.GaussianBlur(blur))


def jpeg(image: Image.Image, quality: int) -> Image.Image:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return Image.open(file)


def depth() -> Image.Image:
    """Nearer below, with two things in front, never white."""
    levels = np.linspace(20, 150, WIDE)[:, None].repeat(WIDE, 1)
    levels[40:120, 50:70] += 40
    levels[60:150, 100:130] += 25
    return Image.fromarray(levels.astype(np.uint8))


def colors(mask: Image.Image, outside: str, inside: str) -> Image.Image:
    image = Image.new("RGB", mask.size, outside)
    image.paste(Image.new("RGB", mask.size, inside), (0, 0), mask)
    return image


def with_opacity(image: Image.Image, opacity: Image.Image) -> Image.Image:
    image = image.convert("RGB")
    image.putalpha(opacity)
    return image


def labels(*values: int) -> Image.Image:
    return Image.fromarray(np.array(values, dtype=np.uint8).repeat(WIDE // len(values))[:, None].repeat(WIDE, 1))


def voc() -> Image.Image:
    image = labels(0, 1, 15)
    image.putpalette([0, 0, 0, 128, 0, 0, *[0] * 39, 192, 128, 128])
    return image


GOOD_MASKS: dict[str, Callable[[], Image.Image]] = {
    "antialiased": lambda: disk(scale=4),
    "feathered": lambda: disk(6),
    "blurred": lambda: disk(25),
    "depth": depth,
    "jpeg_95": lambda: jpeg(disk(), 95),
    "jpeg_30": lambda: jpeg(disk(), 30),
    "jpeg_in_color": lambda: jpeg(disk().convert("RGB"), 60),
    "soft_floor": lambda: disk(8, (60, 255)),
    "one_bit": lambda: disk().convert("1"),
    "palette_of_gray": lambda: disk().convert("P"),
    "drawing": lambda: with_opacity(disk().convert("RGB"), disk(scale=4)),
    "drawing_in_color": lambda: with_opacity(Image.new("RGB", (WIDE, WIDE), "red"), disk(6)),
    "clean_cut_out": lambda: with_opacity(colors(disk(), "black", "teal"), disk()),
}
BAD_MASKS: dict[str, tuple[Callable[[], Image.Image], str, str]] = {
    "labels_0_7": (lambda: labels(0, 7), "label_mask", "error"),
    "trimap_1_2_3": (lambda: labels(2, 1, 3), "label_mask", "error"),
    "labels_and_void": (lambda: labels(0, 0, 15, 15, 15, 15, 15, 255), "label_mask", "error"),
    "labels_0_1_2": (lambda: labels(0, 1, 2), "black_mask", "warning"),
    "palette_of_classes": (voc, "colored_mask", "error"),
    "red_on_white": (lambda: colors(disk(), "white", "red"), "colored_mask", "error"),
    "photo": (lambda: photo(WIDE, WIDE, 40), "colored_mask", "error"),
    "overlay": (lambda: Image.blend(photo(WIDE, WIDE, 41), colors(disk(), "black", "red"), 0.4), "colored_mask", "error"),
    "gray_photo": (lambda: noise_image(WIDE, WIDE, 42).convert("L"), "photo_mask", "warning"),
    "half_gray": (lambda: disk(levels=(0, 128)), "dark_mask", "note"),
    "half_clear": (lambda: with_opacity(disk(), disk(levels=(0, 128))), "dark_mask", "note"),
    "clipspace": (lambda: with_opacity(noise_image(WIDE, WIDE, 43), disk()), "ambiguous_mask", "warning"),
    "both": (lambda: with_opacity(labels(0, 255, 255, 0), disk()), "ambiguous_mask", "warning"),
}  # fmt: skip


def spot(radius: int, blur: float = 0.0, level: int = 255) -> Image.Image:
    yy, xx = np.mgrid[0:512, 0:512]
    inside = (xx - 256) ** 2 + (yy - 256) ** 2 <= radius**2
    return Image.fromarray((inside * level).astype(np.uint8)).filter(ImageFilter.GaussianBlur(blur))


def line(width: int) -> Image.Image:
    image = np.zeros((512, 512), dtype=np.uint8)
    image[:, 300 : 300 + width] = 255
    return Image.fromarray(image)


def classes(*values: int, side: int = 256, count: int = 30) -> Image.Image:
    """Areas with straight borders, each of one of the values."""
    generator = np.random.default_rng(len(values))
    middles = generator.random((count, 2)) * side
    yy, xx = np.mgrid[0:side, 0:side, 0:1][:2]
    nearest = np.argmin((yy - middles[:, 0]) ** 2 + (xx - middles[:, 1]) ** 2, axis=2)
    values_of = np.array([*values, *generator.choice(values, count)][:count], dtype=np.uint8)
    return Image.fromarray(values_of[nearest])


def saved_again(image: Image.Image) -> Image.Image:
    """What JPEG left of it, in a file without loss."""
    return jpeg(image, 75).copy()


FINE_MASKS: dict[str, Image.Image] = {
    "line_1": jpeg(line(1), 90),
    "line_2": jpeg(line(2), 90),
    "line_saved_again": saved_again(line(1)),
    "spot_75": jpeg(spot(4), 75),
    "spot_90": jpeg(spot(4), 90),
    "spot_saved_again": saved_again(spot(4)),
    "blurred_4": spot(4, 12),
    "blurred_8": spot(8, 12),
    "blurred_12": spot(12, 12),
    "blurred_far": spot(24, 80),
    "blurred_line": line(2).filter(ImageFilter.GaussianBlur(10)),
    "ramp": Image.fromarray(np.linspace(0, 30, 256).astype(np.uint8)[None].repeat(256, 0)),
    "speck": spot(1, level=5),
    "floor_of_10": Image.fromarray(np.array([10, 10, 255], dtype=np.uint8).repeat(80)[None].repeat(240, 0)),
}
LABEL_MAPS: dict[str, Image.Image] = {
    "one": classes(0, 7),
    "small": spot(12, level=15),
    "three": classes(0, 1, 2, 3),
    "trimap": classes(1, 2, 3, count=9),
    "void": classes(0, 15, 15, 15, 15, 255),
    "twenty": classes(*range(20)),
    "streets": classes(*range(19), count=200),
    "sparse": classes(7, 11, 21, 23, 24, 26),
    "instances": classes(*range(12), count=12),
    "tiny": classes(0, 5, 9, side=64, count=10),
}


def test_label_maps_are_refused_and_fine_or_soft_masks_are_not() -> None:
    def is_refused(image: Image.Image) -> bool:
        try:
            to_mask(image)
        except BrokenImageError as error:
            return error.code == "label_mask"
        return False

    assert [name for name, image in FINE_MASKS.items() if is_refused(image)] == []
    assert [name for name, image in LABEL_MAPS.items() if not is_refused(image)] == []
    assert doubt_of_mask(FINE_MASKS["speck"], to_mask(FINE_MASKS["speck"])) == "dark_mask"


def test_files_that_can_be_no_mask_are_found_and_others_are_not(tmp_path: Path, draw: Draw) -> None:
    folder, masks = tmp_path / "data", tmp_path / "masks"
    masks.mkdir()
    made = GOOD_MASKS | {name: make for name, (make, _, _) in BAD_MASKS.items()}
    for seed, (name, make) in enumerate(made.items()):
        draw(folder / f"{name}.png", WIDE, WIDE, seed=seed)
        make().save(masks / f"{name}.{'jpg' if name.startswith('jpeg') else 'png'}", quality=90)
    # Its own image in gray, without a photograph's texture.
    flat = colors(disk(3), "#ffd0d0", "#203040")
    flat.save(draw(folder / "itself.png"))
    flat.convert("L").save(masks / "itself.png")
    manifest, findings = read_manifest([SourceSection(path=str(folder), masks=str(masks))])
    report = check_dataset(manifest, findings, DatasetGate([Framing((128,), 16)]))
    of_masks = {
        each.path.stem: (each.code, each.severity) for each in report.findings if each.path and "_mask" in each.code
    }
    assert of_masks == {name: (code, severity) for name, (_, code, severity) in BAD_MASKS.items()} | {
        "itself": ("photo_mask", "warning")
    }
    # Nothing trains or shows what the check refuses.
    for sample in manifest.samples:
        if of_masks.get(sample.path.stem, ("", ""))[1] == "error":
            with pytest.raises(DatasetRefused):
                read_mask(sample, View(fit_to(WIDE, WIDE, Bucket(WIDE, WIDE))))


def test_a_turn_that_only_the_image_has_is_noted_where_its_mask_fits_both_ways(tmp_path: Path, draw: Draw) -> None:
    folder, masks = tmp_path / "data", tmp_path / "masks"
    masks.mkdir()
    for seed, (name, orientation, of_mask, width) in enumerate(
        [("down", 3, 1, 80), ("square", 6, 1, 64), ("both", 3, 3, 80), ("beside", 6, 1, 80), ("plain", 1, 1, 80)]
    ):
        exif = Image.Exif()
        exif[0x0112] = orientation
        noise_image(width, 64, seed).save(draw(folder / f"{name}.png"), exif=exif)
        size = (64, width) if orientation == 6 else (width, 64)
        exif[0x0112] = of_mask
        disk().resize(size).save(masks / f"{name}.png", exif=exif)
    manifest, findings = read_manifest([SourceSection(path=str(folder), masks=str(masks))])
    report = check_dataset(manifest, findings, DatasetGate([Framing((64,), 16)]))
    turned = {(each.path.stem, each.severity) for each in report.findings if each.path and each.code == "turned_mask"}
    assert turned == {("down", "note"), ("square", "note")}
