"""`check --html`: one self-contained page, whatever the file names are."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from lora_trainer.cli.check import check_command, target_problems
from lora_trainer.config.schema import Config, SourceSection
from lora_trainer.models.published import public_architecture
from lora_trainer.report import dataset
from tests.data.drawings import drawing, photo

HOSTILE = "<img src=x onerror=alert(1)>&amp;\"'.png"
FACTS = public_architecture("sd15").facts


class Tags(HTMLParser):
    """Every tag with its attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten images; one is broken, one misnamed with a hostile name, two look the same."""
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(8):
        photo(160, 128, number).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"thing {number}", encoding="utf-8")
    (folder / "0.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(40))
    photo(160, 128, 3).resize((200, 160)).save(folder / "again.png")
    (folder / "again.txt").write_text("thing again", encoding="utf-8")
    drawing(160, 128, 9).save(folder / HOSTILE, "JPEG")
    (folder / HOSTILE).with_suffix(".txt").write_text("<script>alert(2)</script>", encoding="utf-8")
    return folder


def page_of(folder: Path, tmp_path: Path) -> tuple[int, str]:
    config = Config.model_validate({"data": {"resolution": 128}})
    data = config.data.model_copy(update={"sources": (SourceSection(path=str(folder)),)})
    page = tmp_path / "page.html"
    code = check_command(config.model_copy(update={"data": data}), as_json=False, facts=FACTS, page=page)
    return code, page.read_text("utf-8")


def test_the_page_shows_the_problems_and_loads_nothing(folder: Path, tmp_path: Path) -> None:
    code, page = page_of(folder, tmp_path)
    assert code == 3
    tags = Tags(page).found
    sources = [attributes["src"] or "" for tag, attributes in tags if "src" in attributes]
    assert len(sources) == 4  # the hostile one by its name and by its caption, and the two that look the same
    assert all(source.startswith("data:image/webp;base64,") for source in sources)
    assert not [attributes for _, attributes in tags if "href" in attributes or "onerror" in attributes]
    assert sum(tag == "script" for tag, _ in tags) == 1
    assert not re.search(r"https?://|url\(", page)
    assert "<script>alert(2)" not in page
    text = re.sub(r"<[^>]*>", " ", page)
    assert "1 of 10 files cannot be read" in text
    assert "2 of 10 files look the same" in text
    assert "&lt;img src=x onerror=alert(1)&gt;" in text
    assert "refused" in text


def test_the_page_is_bounded(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "MOST_EACH", 3)
    monkeypatch.setattr(dataset, "MOST_IMAGES", 2)
    for path in folder.glob("*.txt"):
        path.unlink()
    page = page_of(folder, tmp_path)[1]
    assert page.count("<img ") == 2
    assert "6 more" in page


def test_a_good_dataset_has_a_page_too(tmp_path: Path) -> None:
    folder = tmp_path / "good"
    folder.mkdir()
    for number in range(6):
        drawing(160, 128, number).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"thing {number}", encoding="utf-8")
    code, page = page_of(folder, tmp_path)
    assert code == 0
    assert "passes" in page
    assert "<img " not in page


def test_a_page_that_cannot_be_written_is_reported(folder: Path, tmp_path: Path) -> None:
    from lora_trainer.core.errors import UsageError

    (tmp_path / "page.html").mkdir()
    with pytest.raises(UsageError, match="is a folder"):
        page_of(folder, tmp_path)


def test_output_paths_are_checked_together_and_before_the_data(folder: Path, tmp_path: Path) -> None:
    config = Config.model_validate({"data": {"sources": [{"path": str(folder)}]}})
    other = tmp_path / "notes.html"
    other.write_text("<title>mine</title>", encoding="utf-8")

    def problems_of_paths(page: Path, fix: Path | None = None) -> list[str]:
        return [problem.message for problem in target_problems(config, page, fix, decode=True)]

    assert "lies in the data" in problems_of_paths(folder / "x.html")[0]
    assert "There is no folder" in problems_of_paths(tmp_path / "none" / "x.html")[0]
    assert "is no page of check" in problems_of_paths(other)[0]
    both = problems_of_paths(tmp_path, folder / "copy")
    assert len(both) == 2
    assert "lies in the data" in both[0]
    assert problems_of_paths(tmp_path / "page.html") == []
    page_of(folder, tmp_path)
    assert problems_of_paths(tmp_path / "page.html") == []  # its own page is overwritten


def test_an_image_inside_a_larger_file_is_shown(tmp_path: Path) -> None:
    import tarfile

    Image.new("RGB", (160, 128), "navy").save(tmp_path / "a.png")
    for number in range(5):
        drawing(160, 128, number).save(tmp_path / f"{number}.png")
    with tarfile.open(tmp_path / "set.tar", "w") as tar:
        for name in ("a", "0", "1", "2", "3", "4"):
            (tmp_path / f"{name}.txt").write_text(f"thing {name}", encoding="utf-8")
            tar.add(tmp_path / f"{name}.png", f"{name}.png")
            tar.add(tmp_path / f"{name}.txt", f"{name}.txt")
    page = page_of(tmp_path / "set.tar", tmp_path)[1]
    assert "nearly one color" in page
    assert page.count("<img ") == 1
