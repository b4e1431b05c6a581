"""kohya's dataset TOML, as `--data` and as part of an import."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from lora_trainer.config.layers import Layer, resolve
from lora_trainer.config.schema import SourceSection
from lora_trainer.core.errors import UsageError
from lora_trainer.importers.data_files import data_file_settings, nested
from lora_trainer.importers.documents import read_document
from lora_trainer.importers.imported import import_file
from lora_trainer.importers.kohya_dataset import dataset_reading
from lora_trainer.run.settings import settle

FILE = Path(__file__).with_name("files") / "kohya_dataset.toml"


def written(folder: Path, text: str) -> Path:
    path = folder / "dataset.toml"
    path.write_text(text, encoding="utf-8")
    return path


def sources(path: Path) -> tuple[SourceSection, ...]:
    return resolve([Layer("d", nested(data_file_settings(path, [])))]).config.data.sources


def test_subset_beats_dataset_beats_general(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        """
        [general]
        flip_aug = true
        shuffle_caption = true
        keep_tokens = 1
        [[datasets]]
        resolution = 512
        keep_tokens = 2
        [[datasets.subsets]]
        image_dir = "a"
        [[datasets.subsets]]
        image_dir = "b"
        keep_tokens = 3
        flip_aug = false
        """,
    )
    first, second = sources(path)
    assert first.captions is not None
    assert second.captions is not None
    assert (first.captions.keep_tokens, second.captions.keep_tokens) == (2, 3)
    assert (first.flip, second.flip) == (True, False)
    assert (first.path, second.path) == (str(tmp_path / "a"), str(tmp_path / "b"))


def test_common_settings_of_subsets_are_written_once(tmp_path: Path) -> None:
    text = "[general]\nshuffle_caption = true\nflip_aug = true\n[[datasets]]\nresolution = 640\n"
    path = written(tmp_path, text + '[[datasets.subsets]]\nimage_dir = "a"\n[[datasets.subsets]]\nimage_dir = "b"\n')
    config = resolve([Layer("d", nested(data_file_settings(path, [])))]).config
    assert config.captions.shuffle
    assert config.data.flip
    assert config.data.resolution == 640
    assert all(source.captions is None and source.resolutions is None for source in config.data.sources)
    # Folder names mean nothing there, so repeats are always written.
    assert [source.repeats for source in config.data.sources] == [1.0, 1.0]


def test_a_subset_without_repeats_is_skipped_as_in_kohya(tmp_path: Path) -> None:
    none = '[[datasets.subsets]]\nimage_dir = "none"\nnum_repeats = 0\n'
    path = written(tmp_path, f'[[datasets]]\n{none}[[datasets.subsets]]\nimage_dir = "a"\nnum_repeats = 2\n')
    resolved = settle([], [Layer("--data", {"data": {"sources": [str(path)]}})])
    assert [source.path for source in resolved.config.data.sources] == [str(tmp_path / "a")]
    (warning,) = [note for note in resolved.notes if "num_repeats" in note]
    assert 'datasets[0].subsets[0] = "none": num_repeats is less than 1: skipped' in warning
    imported = import_file(path)
    assert [source.path for source in imported.config.data.sources] == [str(tmp_path / "a")]
    assert [line.key for line in imported.lines if line.verdict == "ignored"] == ["datasets[0].subsets[0]"]
    with pytest.raises(UsageError) as caught:
        data_file_settings(written(tmp_path, f"[[datasets]]\n{none}"), [])
    assert [problem.message for problem in caught.value.problems] == [f"{path} names no images."]


def test_every_key_of_a_whole_file() -> None:
    document: dict[str, Any] = tomllib.loads(FILE.read_text("utf-8"))
    reading = dataset_reading(FILE, document)
    assert reading.problems == []
    by_verdict: dict[str, list[str]] = {}
    for line in reading.lines:
        by_verdict.setdefault(line.verdict, []).append(line.key)
    subset = "datasets[1].subsets[0]"
    assert by_verdict["unknown"] == [f"{subset}.colour_aug"]
    assert by_verdict["changed"] == [
        "general.resize_interpolation",
        "datasets[0].subsets[0].alpha_mask",
        f"{subset}.color_aug",
        f"{subset}.random_crop",
        f"{subset}.conditioning_data_dir",
        f"{subset}.secondary_separator",
        # One for all datasets here:
        "datasets[1].batch_size",
        "datasets[1].min_bucket_reso",
        "datasets[1].max_bucket_reso",
        "datasets[1].bucket_no_upscale",
        "datasets[1].validation_split",
        "datasets[1].validation_seed",
    ]
    assert by_verdict["ignored"] == ["datasets[0].subsets[1].custom_attributes", f"{subset}.cache_info"]
    assert len(by_verdict["mapped"]) == 33
    assert reading.settings["data.resolution"] == 1024
    assert reading.settings["data.max_aspect"] == 4.0
    cat, reg, small = resolve([Layer("d", nested(reading.settings))]).config.data.sources
    assert (cat.repeats, cat.default_caption, cat.masks, cat.flip, cat.resolutions) == (
        10,
        "sks cat",
        "alpha",
        True,
        (1024,),
    )
    assert cat.captions is not None
    assert (cat.captions.prefix, cat.captions.tag_dropout, cat.captions.dropout_every_n_epochs) == ("photo of", 0.05, 4)
    assert reg.is_reg
    assert reg.captions_file == str(FILE.parent / "pictures" / "cats.json")
    assert (small.resolutions, small.color_variants, small.crop) == ((512,), 4, "random")
    assert small.masks == str(FILE.parent / "masks")


def test_data_of_a_dataset_toml_is_resolved_like_any_other(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        '[[datasets]]\nbatch_size = 3\ncolor_aug = true\n[[datasets.subsets]]\nimage_dir = "a"\nnum_repeats = 5\n',
    )
    more = {"path": str(path), "loss_weight": 0.5}
    resolved = settle([], [Layer("--data", {"data": {"sources": ["x", more]}}), Layer("--set", {"train": {"seed": 1}})])
    plain, cats = resolved.config.data.sources
    assert plain.path == "x"
    assert (cats.path, cats.repeats, cats.loss_weight) == (str(tmp_path / "a"), 5, 0.5)
    assert resolved.config.train.effective_batch_size == 3
    assert resolved.origin["train.effective_batch_size"] == str(path)
    assert any("color_aug = true: drawn anew each time there" in note for note in resolved.notes)
    own = Layer("--set", {"train": {"effective_batch_size": 2}})
    assert settle([], [Layer("--data", {"data": {"sources": [str(path)]}}), own]).config.train.effective_batch_size == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[[datasets]]\nresolution = 512\n", "names no images"),
        ("[[datasets]]\n[[datasets.subsets]]\nnum_repeats = 2\n", "datasets[0].subsets[0] has no image_dir"),
        ('[[datasets]]\n[[datasets.subsets]]\nimage_dir = "a"\nnum_repeat = 2\n', "Did you mean num_repeats"),
        ('[[datasets]]\n[[datasets.subsets]]\nimage_dir = "a"\nnum_repeats = "x"\n', "is not a number"),
        ('[[datasets]]\nsubsets = "a"\n', "datasets[0].subsets is not a list of tables"),
        ("[lora]\nrank = 3\n", "is not a kohya dataset TOML"),
        ("[[datasets]\n", "is not valid TOML"),
        ("datasets = [3]\n", "are tables"),
        (
            '[other]\na = 1\n[[datasets]]\n[[datasets.subsets]]\nimage_dir = "a"\n',
            "other is not part of a dataset TOML",
        ),
    ],
)
def test_problems_are_reported(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        settle([], [Layer("--data", {"data": {"sources": [str(written(tmp_path, text))]}})])
    assert expected in str(caught.value)


def test_a_damaged_or_hostile_file_is_one_message(tmp_path: Path) -> None:
    aliases = "".join(f"{b}: &{b} [{','.join([f'*{a}'] * 10)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True))
    files = {
        "a.json": ('{"a": 1', "is not valid JSON"),
        "b.yaml": ("a: !!python/object/apply:os.system [ls]", "Only plain values are read"),
        "c.yaml": (f"a: &a [1, 1]\n{aliases}", "more than 100,000 values"),
        "d.yaml": ("a: &a [*a]", "more than 100,000 values"),
        "e.json": ("[" * 100_000, "nested too deeply"),
        "f.toml": ("", "is empty"),
        "g.bin": ("\0\0", "is not text"),
        "h.txt": ("hello", "has no settings"),
        "i.json": (" " * 4_000_001, "at most 4,000,000"),
    }
    for name, (text, expected) in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        with pytest.raises(UsageError) as caught:
            read_document(tmp_path / name)
        assert expected in str(caught.value), name
        assert len(caught.value.problems) == 1
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(UsageError):
            read_document(path)
