"""Each finding of the gate on a dataset for it, and none on a good dataset."""

from __future__ import annotations

import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFilter

from gate_examples import SHARES as SHARES_SHOWN
from gate_examples import boxed, by_severity, by_share, worn
from lora_trainer.config.schema import CaptionsSection, SourceSection
from lora_trainer.core.findings import Finding, Severity
from lora_trainer.data.manifest import read_manifest
from lora_trainer.data.sample import Sample
from lora_trainer.data.split import split_validation
from lora_trainer.data.views import Framing
from lora_trainer.dataset_check import DataReport, DatasetGate, check_buckets, check_dataset, check_plan
from lora_trainer.dataset_check.caption_checks import fix_garbled, garbled
from lora_trainer.dataset_check.score import SHARES, by_file, score_of
from lora_trainer.models.single.tokenizers import clip_words
from tests.data.drawings import drawing, photo

SIDE = 128


def judged(*sources: SourceSection, resolution: int = SIDE, rules: CaptionsSection | None = None) -> DataReport:
    manifest, found = read_manifest(list(sources))
    rule = rules or CaptionsSection()
    framings, several = [Framing((resolution,), 16)] * len(sources), [rule] * len(sources)
    return check_dataset(
        manifest, found, DatasetGate(framings, caption_limit=77, rules=several, known_words=clip_words())
    )


def save(folder: Path, name: str, image: Image.Image, caption: str | None = None) -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    image.save(folder / f"{name}.png")
    (folder / f"{name}.txt").write_text(caption or f"a thing, called {name}", encoding="utf-8")
    return folder / f"{name}.png"


@pytest.fixture
def good(tmp_path: Path) -> Path:
    for number in range(10):
        save(tmp_path / "good", f"{number}", (photo, drawing)[number % 2](160, SIDE, number))
    return tmp_path / "good"


def codes(report: DataReport) -> set[tuple[str, str]]:
    return {(finding.code, finding.severity) for finding in report.findings}


def of(folder: Path, **settings: object) -> SourceSection:
    return SourceSection.model_validate({"path": str(folder), **settings})


def test_photographs_and_drawings_are_good(good: Path) -> None:
    report = judged(of(good))
    assert report.findings == ()
    assert report.score == 1.0
    assert set(report.parts.values()) == {1.0}


@pytest.mark.parametrize(
    ("change", "code", "part"),
    [
        (lambda each: each.filter(ImageFilter.GaussianBlur(3)), "blurred", "sharpness"),
        (worn, "over_compressed", "compression"),
        (boxed, "border", "borders"),
        (lambda each: Image.new("RGB", each.size, "red"), "uniform", "contents"),
    ],
)
def test_a_bad_image_is_one_warning(good: Path, change: object, code: str, part: str) -> None:
    image = photo(160, SIDE, 0)
    save(good, "0", change(image))  # type: ignore[operator]
    report = judged(of(good))
    assert codes(report) == {(code, "warning")}
    assert report.score == report.parts[part] == pytest.approx(0.8 ** (0.1 / SHARES[code]))
    assert {name for name, value in report.parts.items() if value < 1.0} == {part}
    assert report.passed


@pytest.mark.parametrize(
    ("fault", "refused_from"),
    [("cut short", 5), ("blurred (Gaussian of 3 pixels)", 50), ("black bars", 75), ("a caption of keys (asdf)", 50)],
)
def test_a_fault_costs_by_its_share(fault: str, refused_from: int, tmp_path: Path) -> None:
    """A few files with a fault pass and most of them refuse; one more never raises the score."""
    reports = list(by_share(tmp_path / "data", fault, SIDE))
    scores = [report.score for report in reports]
    assert scores == sorted(set(scores), reverse=True)
    assert scores[0] == 1.0
    assert [report.passed for report in reports] == [share < refused_from for share in SHARES_SHOWN]


@pytest.mark.parametrize("fault", ["blurred by a Gaussian of … pixels", "enlarged … times"])
def test_a_worse_fault_never_costs_less(fault: str, tmp_path: Path) -> None:
    reports = list(by_severity(tmp_path, fault, SIDE))
    scores = [report.score for report in reports]
    assert scores == sorted(scores, reverse=True)
    assert reports[0].score == 1.0
    assert not reports[-1].passed


def test_slight_upscaling_and_copies_are_allowed_in_every_file(tmp_path: Path) -> None:
    """Slightly small images are only that. Copies train like repeats."""
    for number in range(8):
        save(tmp_path / "small", f"{number}", photo(120, 96, number))
    assert judged(of(tmp_path / "small")).score == pytest.approx(0.8 ** (1 / 1.25))


@pytest.mark.parametrize(
    "caption", ["asdf", "ASDF asdf", "asdfasdf, qwer", "zxcvbnm", "poiu1", "qwertz", "aaaa", "..."]
)
def test_a_caption_without_a_word_is_found(caption: str, good: Path) -> None:
    (good / "0.txt").write_text(caption, encoding="utf-8")
    report = judged(of(good))
    assert codes(report) == {("meaningless_caption", "warning")}
    assert report.passed


@pytest.mark.parametrize(
    "caption", ["sks", "ohwx", "sks dog", "1girl", "7", "poi", "nsfw", "asdf dog", "были", "🙂 cat"]
)
def test_rare_words_and_numbers_are_captions(caption: str, good: Path) -> None:
    for text in good.glob("*.txt"):
        text.write_text(caption, encoding="utf-8")
    assert codes(judged(of(good))) == {("same_caption", "note")}


@pytest.mark.parametrize("caption", ["xkq vzzt", "sdfkjh wekjr", "qpwoz xnvbt lkjw, 3"])
def test_a_caption_of_random_letters_is_found(caption: str, good: Path) -> None:
    (good / "0.txt").write_text(caption, encoding="utf-8")
    report = judged(of(good))
    assert codes(report) == {("random_caption", "warning")}
    assert judged(of(good), rules=CaptionsSection(trigger_word=caption.split(maxsplit=1)[0])).score == 1.0


@pytest.mark.parametrize(
    "caption",
    ["ohwx man", "zkqxwvb dog", "hatsune miku", "nsfw, hdr, dslr", "kimetsu no yaiba", "kot na trawie", "xyzzy"],
)  # fmt: skip
def test_names_triggers_and_other_languages_are_no_random_letters(caption: str, good: Path) -> None:
    (good / "0.txt").write_text(caption, encoding="utf-8")
    assert codes(judged(of(good))) == set()


def test_one_caption_for_many_images_is_a_warning_that_costs_nothing(tmp_path: Path) -> None:
    for number in range(40):
        save(tmp_path, f"{number:02}", photo(64, 64, number), "a watercolor")
    report = judged(of(tmp_path), resolution=64)
    assert codes(report) == {("same_caption", "warning")}
    assert report.score == 1.0
    for number in range(40):
        (tmp_path / f"{number:02}.txt").write_text(f"a watercolor, {'abcd'[number % 4]}", encoding="utf-8")
    assert codes(judged(of(tmp_path), resolution=64)) == {("few_captions", "note")}


def test_trigger_words_and_default_captions_are_intended(good: Path) -> None:
    for text in good.glob("*.txt"):
        text.write_text("asdf", encoding="utf-8")
    assert not judged(of(good)).passed
    assert judged(of(good), rules=CaptionsSection(trigger_word="asdf")).score == 1.0
    for text in good.glob("*.txt"):
        text.unlink()
    assert judged(of(good, default_caption="asdf")).score == 1.0
    assert judged(of(good.rename(good.with_name("10_asdf")))).score == 1.0


@pytest.mark.slow
def test_images_downscaled_enough_are_sharp_and_have_no_blocks(tmp_path: Path) -> None:
    for number in range(3):
        save(tmp_path, f"soft{number}", photo(640, 512, number).filter(ImageFilter.GaussianBlur(3)))
        save(tmp_path, f"worn{number}", worn(photo(640, 512, 20 + number)))
    assert codes(judged(of(tmp_path))) == set()
    assert codes(judged(of(tmp_path), resolution=512)) == {("blurred", "warning"), ("over_compressed", "warning")}


def test_a_jpeg_of_low_quality_is_known_by_its_tables(good: Path) -> None:
    drawing(160, SIDE, 1).save(good / "low.jpg", quality=15)
    (good / "low.txt").write_text("low", encoding="utf-8")
    report = judged(of(good))
    (finding,) = [each for each in report.findings if each.code == "over_compressed"]
    assert "JPEG quality" in finding.message


def test_a_broad_frame_may_be_a_background_and_holes_are_reported(good: Path) -> None:
    framed = Image.new("RGB", (256, 256), "white")
    framed.paste(photo(136, 136, 30), (60, 60))
    save(good, "framed", framed)
    clear = photo(160, SIDE, 31).convert("RGBA")
    clear.paste((0, 0, 0, 0), (0, 0, 80, 60))
    save(good, "clear", clear)
    report = judged(of(good))
    assert codes(report) == {("border", "note"), ("transparent", "note")}
    assert report.score == 1.0


def test_similar_images_are_named_once_in_pairs(good: Path) -> None:
    for number in range(3):
        save(good, f"again{number}", photo(160, SIDE, 4).resize((168 + 8 * number, 134 + 6 * number)))
    save(good, "mirrored", photo(160, SIDE, 6).transpose(Image.Transpose.FLIP_LEFT_RIGHT))
    report = judged(of(good))
    assert codes(report) == {("near_duplicate", "warning"), ("mirrored", "note")}
    (finding,) = [each for each in report.findings if each.severity == "warning"]
    assert finding.path == good / "4.png"
    assert finding.message == "looks the same as again0.png, again1.png, again2.png."
    assert report.score == pytest.approx(0.8 ** (4 / 14 / 0.5))
    assert report.parts["variety"] == report.score
    assert [len(group) for group in report.groups] == [4]
    assert report.heading("near_duplicate", [finding]) == "4 of 14 files look the same"


def test_similar_images_stay_on_one_side_of_the_split(good: Path) -> None:
    for number in range(4):
        twin = photo(160, SIDE, number * 2).resize((168, 134))
        save(good, f"again{number}", twin if number < 2 else twin.transpose(Image.Transpose.FLIP_LEFT_RIGHT))
    report = judged(of(good))

    def torn(kin: dict[str, str]) -> int:
        """The number of splits with similar images on both sides."""
        splits = [split_validation(report.samples, 0.3, seed, kin) for seed in range(12)]
        twins = {f"again{number}": f"{number * 2}" for number in range(4)}
        families = [[{twins.get(each.path.stem, each.path.stem) for each in side} for side in pair] for pair in splits]
        assert all(len(validation) == 4 for _, validation in splits)
        return sum(bool(train & validation) for train, validation in families)

    assert torn(report.kin) == 0
    assert torn({}) > 6


def test_datasets_of_one_thing_have_little_variety(tmp_path: Path) -> None:
    for number in range(10):
        image = drawing(160, SIDE, 3)
        image.paste(Image.new("RGB", (40, 40), (25 * number, 250 - 25 * number, 128)), (10 * number, 8 * number))
        save(tmp_path, f"{number}", image)
    assert ("little_variety", "note") in codes(judged(of(tmp_path)))


def test_captions_as_a_whole(good: Path) -> None:
    for number in range(6):
        (good / f"{number}.txt").write_text("a photo of sks", encoding="utf-8")
    assert codes(judged(of(good))) == {("repeated_caption", "note")}
    for number in range(10):
        text = f"sks {number}" if number < 5 else "a long text about many things that can be seen here " + str(number)
        (good / f"{number}.txt").write_text(text, encoding="utf-8")
    assert codes(judged(of(good))) == {("uneven_captions", "note")}
    report = judged(of(good), rules=CaptionsSection(trigger_word="sks"))
    assert codes(report) == {("uneven_captions", "note"), ("missing_trigger", "note")}
    assert "5 of 10 captions lack the trigger 'sks'" in " ".join(each.message for each in report.general)
    assert ("missing_trigger", "note") not in codes(
        judged(of(good), rules=CaptionsSection(trigger_word="sks", suffix="sks"))
    )
    (good / "0.txt").write_text("a cafÃ© sks", encoding="utf-8")
    assert ("garbled_caption", "warning") in codes(judged(of(good)))


@pytest.mark.parametrize(
    ("read", "meant"),
    [
        ("KÃ¤se", "Käse"),
        ("donâ€™t", "don’t"),
        ("donâ\x80\x99t, Ã\x81rbol", "don’t, Árbol"),  # as Latin-1
        ("a çÃ©", "a çÃ©"),
        ("naïve café", "naïve café"),
    ],
)
def test_letters_read_in_a_wrong_encoding(read: str, meant: str) -> None:
    assert fix_garbled(read) == meant
    assert bool(garbled(read)) == (read != meant)


def test_a_letter_of_windows_that_was_read_as_latin_1_is_found(good: Path) -> None:
    (good / "0.txt").write_text("a dog\x92s bowl", encoding="utf-8")
    assert codes(judged(of(good))) == {("garbled_caption", "warning")}


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=40))
def test_correct_text_is_unchanged(text: str) -> None:
    """Any fixed text was UTF-8 read as Windows-1252 or Latin-1, word by word."""
    for before, after in zip(text.split(), fix_garbled(text).split(), strict=True):
        assert before == after or len(after.encode("utf-8")) == len(before)


def test_regularization_images_are_not_the_subject(good: Path, tmp_path: Path) -> None:
    for number in range(2):
        save(tmp_path / "class", f"{number}", drawing(160, SIDE, 50 + number), "a thing")
    report = judged(of(good), of(tmp_path / "class", is_reg=True))
    assert codes(report) == {("few_regularization", "note")}
    for number in range(3, 10):
        (good / f"{number}.png").unlink()
        (good / f"{number}.txt").unlink()
    report = judged(of(good), of(tmp_path / "class", is_reg=True))
    assert ("few_images", "warning") in codes(report)
    assert report.parts["count"] == pytest.approx(0.8)


def test_steps_and_rank_against_the_images() -> None:
    assert check_plan(20, 100.0, 16) == []
    assert [each.code for each in check_plan(20, 900.0, 16)] == ["many_exposures"]
    assert [each.code for each in check_plan(20, 2.0, 16)] == ["few_exposures"]
    assert [each.code for each in check_plan(20, 100.0, 128)] == ["large_rank"]
    assert check_plan(200, 100.0, 128) == []


def test_buckets_with_few_images() -> None:
    assert check_buckets([10, 6, 2], 4) == []
    assert [each.code for each in check_buckets([10, 2, 2, 1], 4)] == ["thin_buckets"]
    assert [each.code for each in check_buckets([10, 1], 4)] == ["lone_bucket"]
    assert check_buckets([10, 1], 1) == check_buckets([1], 1) == []


def sample_of(number: int) -> Sample:
    return Sample(Path(f"{number:02}.png"), "a thing", 128, 128, f"{number:064}")


WARNINGS = {"captions": "garbled_caption", "sizes": "cropped", "distinct": "duplicate", "contents": "uniform",
            "sharpness": "blurred", "borders": "border", "formats": "a new check"}  # fmt: skip
COPY = list(WARNINGS).index("distinct")
severities: st.SearchStrategy[Severity | None] = st.sampled_from([None, None, "note", "warning", "error"])


@settings(deadline=None)
@given(
    st.lists(st.lists(severities, min_size=len(WARNINGS), max_size=len(WARNINGS)), min_size=1, max_size=12),
    st.data(),
)
def test_the_score_is_bounded_and_falls_when_one_more_file_breaks(
    rows: Sequence[Sequence[Severity | None]], data: st.DataObject
) -> None:
    """For any other findings. At worst another file loses a warning, or a pair disappears."""
    samples = [sample_of(number) for number in range(len(rows))]
    pairs = data.draw(st.integers(0, len(samples) // 2))

    def score(rows: Sequence[Sequence[Severity | None]], pairs: int, cut: int) -> float:
        tars = [Finding("damaged_tar", "warning", "is cut.", path=Path(f"{number}.tar")) for number in range(cut)]
        found: dict[str, list[Finding]] = {"readable": [*tars]}
        for place, (name, code) in enumerate(WARNINGS.items()):
            found[name] = [
                Finding(code, severity, "is odd.", path=sample.path)
                for sample, row in zip(samples, rows, strict=True)
                if (severity := row[place])
            ]
        files = by_file(samples, [each for group in found.values() for each in group])
        value, parts = score_of(found, [sample.path for sample in samples], samples, files, pairs)
        assert 0.0 <= value <= min(parts.values())
        return value

    def changed(row: int, column: int | None, severity: Severity | None) -> list[list[Severity | None]]:
        """The rows with another severity in one column of a row, or with nothing but that in the first."""
        new = [list(each) for each in rows]
        new[row] = [severity] + [None] * (len(WARNINGS) - 1) if column is None else new[row]
        new[row][column or 0] = severity
        return new

    place, column = data.draw(st.integers(0, len(rows) - 1)), data.draw(st.integers(0, len(WARNINGS) - 1))
    cut = data.draw(st.integers(0, 5))
    before, broken = score(rows, pairs, cut), changed(place, None, "error")
    assert score(broken, pairs, cut) <= before
    assert score(rows, pairs, cut + 1) < before or before == 0.0
    steps = [score(changed(place, column, each), pairs, cut) for each in ("note", "warning", "error")]
    assert steps == sorted(steps, reverse=True)
    if "error" not in rows[place]:
        assert score(broken, max(0, pairs - 1), cut) <= before
        copy = next((each for each, row in enumerate(rows) if each != place and row[COPY] == "warning"), None)
        if copy is not None:
            broken[copy][COPY] = None
            assert score(broken, pairs, cut) <= before


def test_a_truncated_tar_lowers_the_score(good: Path, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "data.tar", "w") as tar:
        for path in sorted(good.iterdir()):
            tar.add(path, path.name)
    assert judged(of(tmp_path / "data.tar")).score == 1.0
    data = (tmp_path / "data.tar").read_bytes()
    with tarfile.open(tmp_path / "data.tar") as tar:
        (tmp_path / "data.tar").write_bytes(data[: tar.getmember("8.png").offset_data + 100])
    report = judged(of(tmp_path / "data.tar"))
    assert codes(report) == {("damaged_tar", "warning")}
    assert len(report.samples) == 8
    assert report.score == report.parts["readable"] == pytest.approx(0.8 ** (1 / 9 / 0.2))
