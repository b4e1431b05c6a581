"""The cache of image measures: its size is shown, and unused entries are removed."""

from __future__ import annotations

import os
from pathlib import Path

from lora_trainer.data.caches.pruning import cache_clean, cache_status
from lora_trainer.data.images.decode import measure_images
from lora_trainer.data.images.measures import MEASURES
from lora_trainer.data.images.remembered import FilePlace, Kept, Remembered, Stamp, remembered
from lora_trainer.data.manifest import read_manifest
from lora_trainer.data.sample import Sample
from tests.data.conftest import Draw


def known(samples: tuple[Sample, ...]) -> tuple[list[str], list[str]]:
    """Names of the images with cached headers, and with cached measures."""
    with remembered() as store:
        headers = store.headers([FilePlace(bytes(each.path), 0, -1) for each in samples])
        measures = store.measures([each.content for each in samples], MEASURES)
    paths = {place.path for place in headers}
    names = [each.path.name for each in samples if bytes(each.path) in paths]
    return names, [each.path.name for each in samples if each.content in measures]


def test_entries_of_deleted_files_are_removed(tmp_path: Path, own_cache_folder: Path, draw: Draw) -> None:
    for number in range(3):
        path = draw(tmp_path / "set" / f"{number}.png", seed=number)
        os.utime(path, (1000, 1000))  # files written just now are not cached
    samples = read_manifest([tmp_path / "set"])[0].samples
    measure_images(samples)
    every = ["0.png", "1.png", "2.png"]
    assert known(samples) == (every, every)
    assert cache_status(own_cache_folder).remembered > 0
    assert "about images that were read before" in cache_status(own_cache_folder).lines[-1]
    cache_clean(own_cache_folder)
    assert known(samples) == (every, every)
    (tmp_path / "set" / "1.png").unlink()
    cache_clean(own_cache_folder)
    assert known(samples) == (["0.png", "2.png"], ["0.png", "2.png"])


def test_above_the_limit_the_oldest_entries_are_removed_first(tmp_path: Path) -> None:
    files = [tmp_path / f"{number:04}" for number in range(400)]
    places = [FilePlace(bytes(file), 0, -1) for file in files]
    contents = [f"{number:064x}" for number in range(400)]
    for file in files:
        file.touch()
    with remembered(tmp_path / "cache") as store:
        rows = {
            place: Kept(Stamp(1, 1, 1000 - number, 1), contents[number], 1, 1, "PNG", 1)
            for number, place in enumerate(places)
        }
        store.keep_headers(rows)
        store.keep_measures(dict.fromkeys(contents, "x" * 1000), 1)
        store.prune(10**9)
        assert left(store, places) == list(range(400))
        store.prune(200_000)
        kept = left(store, places)
        assert 20 < len(kept) < 100
        assert kept == list(range(len(kept)))
        assert len(store.measures(contents, 1)) == len(kept)
    assert (tmp_path / "cache" / "images.sqlite").stat().st_size <= 200_000


def left(store: Remembered, places: list[FilePlace]) -> list[int]:
    headers = store.headers(places)
    return [number for number, place in enumerate(places) if place in headers]
