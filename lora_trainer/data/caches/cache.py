"""Latents and text-encoder outputs on disk: planned without encoders, filled with them.

`plan_latents` and `plan_texts` say what is there, what must be built and why;
`fill_latents` and `fill_texts` build it. So encoders are loaded only when something is
missing. Keys depend on the image's content, its fit, the encoder and the precision,
never on names or places.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from lora_trainer.core.conditioning import EditCaption
from lora_trainer.core.findings import counted
from lora_trainer.data.caches.entries import entry_sizes, is_sound, was_damaged
from lora_trainer.data.caches.files import former_files
from lora_trainer.data.caches.filling import ALONE, Progress, Share, Work, build_missing, usual_workers
from lora_trainer.data.caches.reasons import changed, recall, remember
from lora_trainer.data.images.pixels import ShownView, encode_shown, read_controls, read_shown
from lora_trainer.data.prompt_weights import WeightedText, spoken

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from lora_trainer.data.buckets import Bucket
    from lora_trainer.data.sample import ControlImage, Sample
    from lora_trainer.data.views import View

# Part of every key: change it when images are fitted to their bucket differently.
TRANSFORM = "lanczos-cover-centre-1"
RECOLORED, MASKED = "recoloured-1", "area-1"  # likewise, of recolored views and of masks
# Likewise, of images whose header states other colors than sRGB's, and of mask files with transparency.
CONVERTED, MASKED_BY_ALPHA = "srgb-1", "alpha-1"

# In the order in which they are looked for: the first that differs is the reason.
REASONS = {
    "content": ("image changed", "images changed"),
    "written": ("caption changed", "captions changed"),
    "caption": ("caption options changed", "caption options changed"),
    "weights": ("prompt weights changed", "prompt weights changed"),
    "size": ("size changed", "sizes changed"),
    "mask": ("mask changed", "masks changed"),
    "controls": ("control image changed", "control images changed"),
    "encoder": ("new for this encoder", "new for this encoder"),
    "dtype": ("precision changed", "precision changed"),
}
PLURALS = dict(REASONS.values())

# Entries of fewer bytes than this are read and checked when they are planned, which takes half a second; opening a file
# takes as long as reading some bytes. Of more, damage shows when an entry is read; `cache prune --verify` looks for it.
CHECKED_AT_START, TO_OPEN = 2**28, 2**15

Item = TypeVar("Item")
Caption = str | WeightedText  # weighted where some words weigh more or less than others


@dataclass(frozen=True)
class EditText:
    """A caption that is read together with the control images of a view of its sample."""

    caption: Caption
    sample: Sample
    view: View


Record = dict[str, str]  # what an entry depends on, by the names of REASONS; all but these are in its key
ONLY_EXPLAINS = ("written",)  # the caption as it is in the dataset, which its texts are made of
LOST, FORMER = "not in the cache any more", "cached by an earlier version"


@dataclass(frozen=True)
class CachePlan(Generic[Item]):
    """What is cached and what must be built. `keys` are in the order of `items`."""

    kind: str  # "latents" or "texts"
    folder: Path
    dtype: torch.dtype
    items: tuple[Item, ...]
    keys: tuple[str, ...]
    missing: tuple[int, ...]  # indices of items to build, each key once
    reasons: tuple[str, ...]  # in the order of `missing`
    describe: Callable[[int], tuple[str, Record]]  # what an item is called between runs, and what its entry depends on

    @property
    def filled(self) -> Filled:
        """The counts once all missing entries are built."""
        entries = len(set(self.keys))
        return Filled(self.kind, entries - len(self.missing), len(self.missing), dict(Counter(self.reasons)))

    def still_missing(self) -> CachePlan[Item]:
        """The same without what others have built since."""
        there = entry_sizes(self.folder, self.kind, [self.keys[index] for index in self.missing])
        left = [each for each in zip(self.missing, self.reasons, strict=True) if self.keys[each[0]] not in there]
        return replace(self, missing=tuple(index for index, _ in left), reasons=tuple(reason for _, reason in left))


CACHE_OF = {"latents": ("latent cache", "image"), "texts": ("text embedding cache", "text")}  # and what it holds


@dataclass(frozen=True)
class Filled:
    """What a fill did, in distinct entries."""

    kind: str
    reused: int
    rebuilt: int
    reasons: dict[str, int]

    @property
    def line(self) -> str:
        """`latent cache: 31 images, encoding 7 (5 new, 2 images changed)`."""
        cache, unit = CACHE_OF[self.kind]
        work = f"encoding {self.rebuilt}" if self.rebuilt else "all cached"
        text = f"{cache}: {counted(self.reused + self.rebuilt, unit)}, {work}"
        if not self.reasons:
            return text
        ranked = sorted(self.reasons.items(), key=lambda entry: (-entry[1], entry[0]))
        named = [f"{count} {PLURALS.get(reason, reason) if count > 1 else reason}" for reason, count in ranked]
        return f"{text} ({', '.join(named)})"


def _key(record: Record) -> str:
    """Name of an entry: 64 hex digits."""
    named = "".join(
        f"{name}={len(value)}:{value};" for name, value in sorted(record.items()) if name not in ONLY_EXPLAINS
    )
    return hashlib.sha256(named.encode("utf-8", "surrogatepass")).hexdigest()


def _view_text(view: View) -> str:
    """What a view does to an image. Unused options are not named, so that keys stay when options are added."""
    fit = view.fit
    text = f"{fit.resized_width}x{fit.resized_height}+{fit.left}+{fit.top} {fit.bucket} {TRANSFORM}"
    if view.flip:
        text += " mirrored"
    return f"{text} {RECOLORED} {view.color}" if view.color else text


def _content_text(image: Sample | ControlImage) -> str:
    """Which pixels an image has. Only where they are converted the text says so: all other keys stay."""
    return f"{image.content} {CONVERTED}" if image.colors == "converted" else image.content


def _controls_text(sample: Sample) -> str:
    return " ".join(map(_content_text, sample.controls))


def plan_latents(
    shown: Sequence[tuple[Sample, View]], folder: Path, encoder_key: str, dtype: torch.dtype
) -> CachePlan[tuple[Sample, View]]:
    """Which latents of so many (sample, view) are cached. Writes nothing but marks of damage."""
    items = tuple(shown)
    names = _named(items)

    def describe(index: int) -> tuple[str, Record]:
        sample, view = items[index]
        mask = "none" if sample.mask is None else f"{sample.mask.content or 'alpha'} {MASKED}"
        if sample.mask is not None and sample.mask.has_alpha:
            mask = f"{mask} {MASKED_BY_ALPHA}"
        # Named only where there are any, so that the entries of all other images keep their keys.
        controls = {"controls": _controls_text(sample)} if sample.controls else {}
        return names[index], controls | {
            "content": _content_text(sample),
            "size": _view_text(view),
            "mask": mask,
            "encoder": encoder_key,
            "dtype": str(dtype),
        }

    return _plan("latents", folder, dtype, items, describe)


def _named(items: Sequence[tuple[Sample, View]]) -> list[str]:
    """The path of each, with a number from an image's second view on: the index remembers entries by it."""
    seen: Counter[str] = Counter()
    names = []
    for sample, _ in items:
        path = str(sample.path)
        names.append(_numbered(path, seen[path]))
        seen[path] += 1
    return names


def _numbered(path: str, number: int) -> str:
    return f"{path}#{number}" if number else path


def _first_of(kind: str, name: str) -> str:
    """What a sample's first text is called, for its others: more texts of a known caption come of other options."""
    return re.sub(r"#\d+$", "", name) if kind == "texts" else name


def plan_texts(
    samples: Sequence[Sample],
    extra: Sequence[str],
    folder: Path,
    encoder_key: str,
    dtype: torch.dtype,
    views: Sequence[Sequence[View]] = (),
) -> CachePlan[Caption | EditText]:
    """Which captions are cached: all that the samples are trained on, then `extra` ones, then the empty one.

    With the samples' `views`, captions of samples with control images are read together with these: each in each view.
    `text_keys` sorts the keys by sample. Writes as above.
    """
    captions: list[Caption | EditText] = []
    names: list[str] = []
    written: list[str] = []
    seen: Counter[str] = Counter()  # of a sample that is also measured the canonical text comes after its variants
    for sample, own in zip(samples, views or [()] * len(samples), strict=True):
        texts = [spoken(text) for text in sample.texts] if sample.weighted else sample.texts
        if sample.controls and own:
            captions += [EditText(text, sample, view) for view in own for text in texts]
        else:
            captions += texts
        path, count = str(sample.path), len(texts) * times_read(sample, own)
        names += [_numbered(path, number) for number in range(seen[path], seen[path] + count)]
        written += [sample.caption if sample.written is None else sample.written] * count
        seen[path] += count
    captions += (*extra, "")
    names += [f"caption:{caption}" for caption in (*extra, "")]
    written += (*extra, "")

    def describe(index: int) -> tuple[str, Record]:
        facts = {"written": written[index], "encoder": encoder_key, "dtype": str(dtype)}
        return names[index], _caption_record(captions[index]) | facts

    return _plan("texts", folder, dtype, tuple(captions), describe)


def times_read(sample: Sample, views: Sequence[View]) -> int:
    """How often each text of a sample is read: once, or in each view of its control images."""
    return len(views) if sample.controls and views else 1


def text_keys(
    plan: CachePlan[Caption | EditText], samples: Sequence[Sample], views: Sequence[Sequence[View]] = ()
) -> tuple[tuple[str, ...], ...]:
    """For each of the samples that the plan was made of, the keys of its texts in their order; view by view with `views`."""
    paired = zip(samples, views or [()] * len(samples), strict=True)
    counts = (len(sample.texts) * times_read(sample, own) for sample, own in paired)
    ends = tuple(itertools.accumulate(counts, initial=0))
    return tuple(plan.keys[first:end] for first, end in itertools.pairwise(ends))


def _caption_record(caption: Caption | EditText) -> Record:
    if isinstance(caption, EditText):
        sample = caption.sample  # its content chooses the colors of a recolored control image
        seen = {"controls": _controls_text(sample), "size": _view_text(caption.view)}
        return _caption_record(caption.caption) | seen | {"content": _content_text(sample)}
    if isinstance(caption, str):
        return {"caption": caption}
    return {"caption": "".join(part for part, _ in caption), "weights": json.dumps(caption)}


def _plan(
    kind: str,
    folder: Path,
    dtype: torch.dtype,
    items: tuple[Item, ...],
    describe: Callable[[int], tuple[str, Record]],
) -> CachePlan[Item]:
    keys = tuple(_key(describe(index)[1]) for index in range(len(items)))
    first = {key: index for index, key in reversed(list(enumerate(keys)))}
    sizes = entry_sizes(folder, kind, first)
    to_read = sum(sizes.values()) + TO_OPEN * len(sizes)
    checked = sizes if to_read <= CHECKED_AT_START else {}
    damaged = {key for key in checked if not is_sound(folder, kind, key)}
    missing = sorted(index for key, index in first.items() if key not in sizes or key in damaged)
    named = dict.fromkeys(describe(index)[0] for index in missing)
    before = recall(folder, kind, list(named | dict.fromkeys(_first_of(kind, name) for name in named)))

    lost = FORMER if missing and former_files(folder) else LOST

    def why(index: int) -> str:
        source, record = describe(index)
        if keys[index] in damaged or was_damaged(folder, kind, keys[index]):
            return "damaged"
        known = before.get(source) or before.get(_first_of(kind, source))
        if not known:
            return "new"
        names = changed(known, _whole(record))
        return next((phrases[0] for name, phrases in REASONS.items() if name in names), lost)

    return CachePlan(kind, folder, dtype, items, keys, tuple(missing), tuple(map(why, missing)), describe)


def _whole(record: Record) -> Record:
    """With all names, since not every entry depends on everything."""
    return {name: record.get(name, "") for name in REASONS}


def fill_latents(
    plan: CachePlan[tuple[Sample, View]],
    encode_image: Callable[[Tensor], tuple[Tensor, Tensor]],
    batch: int,
    progress: Progress | None = None,
    *,
    workers: int | None = None,
    share: Share = ALONE,
) -> Filled:
    """Build the missing latents, `batch` images of one bucket at a time, decoded ahead by `workers` threads.

    The processes of a run divide the entries by their `share`, and each returns when all are there.
    `encode_image` takes pixels [B, 3, H, W] in [-1, 1] (float32, CPU) and gives mean and
    spread, each [B, C, h, w]. Raises DatasetRefused for an image that cannot be read or
    has changed since it was listed, TrainingFailed for latents that are not finite and for
    a disk that refuses.
    """

    def group(index: int) -> tuple[Bucket, bool, int]:
        sample, view = plan.items[index]
        return view.fit.bucket, sample.mask is not None, len(sample.controls)

    def prepare(index: int) -> ShownView:
        return read_shown(*plan.items[index])

    def encode(places: list[int], prepared: list[ShownView]) -> dict[str, Tensor]:
        del places
        return encode_shown(prepared, encode_image, plan.dtype)

    def name(index: int) -> str:
        return plan.items[index][0].path.name

    many = usual_workers() if workers is None else max(1, workers)
    work = Work(plan.folder, plan.kind, plan.keys, group, prepare, encode, name, batch, many, share)
    return _fill(plan, work, progress)


def fill_texts(
    plan: CachePlan[Caption | EditText],
    encode_text: Callable[[Sequence[Caption | EditCaption]], Mapping[str, Tensor]],
    batch: int,
    progress: Progress | None = None,
    *,
    share: Share = ALONE,
) -> Filled:
    """Build the missing captions, divided as above. `encode_text` takes B captions and gives tensors with B first.

    Raises TrainingFailed for values that are not finite and for a disk that refuses, DatasetRefused for a control image
    that cannot be read.
    """

    def group(index: int) -> tuple[Bucket, int] | None:
        item = plan.items[index]
        return (item.view.fit.bucket, len(item.sample.controls)) if isinstance(item, EditText) else None

    def prepare(index: int) -> Caption | EditCaption:
        item = plan.items[index]
        if not isinstance(item, EditText):
            return item
        return EditCaption(item.caption, read_controls(item.sample, item.view))

    def encode(places: list[int], captions: list[Caption | EditCaption]) -> dict[str, Tensor]:
        del places
        encoded = encode_text(captions)
        return {
            name: tensor.to(plan.dtype) if tensor.is_floating_point() else tensor for name, tensor in encoded.items()
        }

    def name(index: int) -> str:
        item = plan.items[index]
        return repr(item.caption if isinstance(item, EditText) else item)

    work = Work(plan.folder, plan.kind, plan.keys, group, prepare, encode, name, batch, 1, share)
    return _fill(plan, work, progress)


def _fill(plan: CachePlan[Item], work: Work[Any], progress: Progress | None) -> Filled:
    build_missing(work, progress)
    described = ((source, _whole(record)) for source, record in map(plan.describe, range(len(plan.items))))
    digest = hashlib.sha256("".join(plan.keys).encode("ascii"))
    for index in range(len(plan.items)):
        digest.update(plan.describe(index)[0].encode("utf-8", "surrogatepass") + b"\0")
    remember(plan.folder, plan.kind, digest.digest(), described)
    return plan.filled
