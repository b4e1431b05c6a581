"""The keys of musubi-tuner's dataset TOML, which has no subsets: each of `[[datasets]]` is a folder or a table of images.

After musubi-tuner's docs/dataset_config.md and its datasources.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lora_trainer.importers.reading import Around, KeyRule, Took, located
from lora_trainer.importers.rules import by, lacking, nothing, path_to, text

TOOL = "musubi-tuner"
IMAGES = ("image_directory", "image_jsonl_file")
VIDEOS = ("video_directory", "video_jsonl_file")
LONGEST_RECORD = 1_000_000  # characters of a JSONL's first line
NUMBERED = re.compile(r"(.+)(_\d+)")  # the name of an image and which of its control images a file is
CONTROL = re.compile(r"control_path(?:_(\d+))?")
ALIKE = "a control image is cut and resized as its image is, transparent parts on white"
OF_VIDEOS = "videos are not trained"


def _stems(folder: str) -> set[str]:
    """The names of a folder's files without endings; none of a folder that is not there."""
    with contextlib.suppress(OSError):
        return {os.path.splitext(name)[0] for name in os.listdir(folder)}
    return set()


def _controls(value: Any, around: Around) -> Took:
    """The folder, and where its files are numbered (`cat_0.png`, `cat_1.png`) each number as a control image of its own."""
    folder = located(around.folder, text(value))
    images = _stems(located(around.folder, text(around["image_directory"] or "")))
    names = _stems(folder)
    numbered = {match[2] for name in names - images if (match := NUMBERED.fullmatch(name)) and match[1] in images}
    labels = sorted(numbered, key=lambda label: int(label[1:]))
    plain = [folder] if images <= names or not labels else []
    return Took({"source.control_images": [*plain, *(f"{folder}/*{label}" for label in labels)]})


def _table(value: Any, around: Around) -> Took:
    """A JSONL with `image_path`, `caption` and `control_path` or `control_path_N`, by the keys of its first record."""
    path = located(around.folder, text(value))
    record: Any = None
    if Path(path).is_file():  # opening a pipe would wait forever
        with contextlib.suppress(OSError, ValueError), open(path, encoding="utf-8-sig") as file:
            record = json.loads(file.readline(LONGEST_RECORD))
    keys = [match for key in record if (match := CONTROL.fullmatch(key))] if isinstance(record, dict) else []
    columns = [match[0] for match in sorted(keys, key=lambda match: int(match[1] or 0))]
    return Took({"source.path": path} | ({"source.control_columns": columns} if columns else {}))


RULES: Mapping[str, KeyRule] = {
    "image_directory": path_to("source.path"),
    "image_jsonl_file": by(
        _table, "source.path source.control_columns", "relative paths are those of its folder", changes=True
    ),
    "control_directory": by(_controls, "source.control_images"),
    **dict.fromkeys(
        (
            "no_resize_control",
            "control_resolution",
            "flux_kontext_no_resize_control",
            "qwen_image_edit_no_resize_control",
            "qwen_image_edit_control_resolution",
        ),
        lacking(ALIKE),
    ),
    "multiple_target": lacking("an image has one target"),
    "cache_directory": nothing("caches are found by content here, in cache.dir"),
    "skip_corrupted_cache": nothing("a damaged entry of a cache is always made again"),
    **dict.fromkeys(
        (
            *VIDEOS,
            *("target_frames", "frame_extraction", "frame_stride", "frame_sample", "max_frames", "source_fps"),
            *("fp_latent_window_size", "fp_1f_clean_indices", "fp_1f_target_index", "fp_1f_no_post"),
        ),
        lacking(OF_VIDEOS),
    ),
}
DEFAULTS: Mapping[str, Any] = {
    "resolution": [960, 544],
    "num_repeats": 1,
    "batch_size": 1,
    "enable_bucket": False,
    "validation_split": 0.0,
}


def is_musubi(datasets: list[Any]) -> bool:
    """Whether the datasets of a TOML are of musubi-tuner: they name their images themselves."""
    return any(key in data for data in datasets if isinstance(data, dict) for key in (*IMAGES, *VIDEOS))
