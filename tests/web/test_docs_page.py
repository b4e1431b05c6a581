"""`/api/docs`: the pages as HTML, their links and headings, the search, and what a wheel contains."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
from markdown import Markdown
from markdown.extensions.toc import TocExtension
from starlette.testclient import TestClient

from lora_trainer.web.documentation import Documentation, documentation_folder, read_documentation
from tests.web.site import problems_of, site


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> TestClient:
    return site(tmp_path_factory.mktemp("site") / "runs")


@pytest.fixture(scope="module")
def documentation() -> Documentation:
    return read_documentation(documentation_folder())


class Tags(HTMLParser):
    """Every tag with its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def in_folder(folder: Path, text: str) -> str:
    """The HTML of a page `page.md` beside a page `other.md` and an image."""
    folder.mkdir(exist_ok=True)
    (folder / "page.md").write_text(text, encoding="utf-8")
    (folder / "other.md").write_text("# Other\n\n## Part\n", encoding="utf-8")
    read = read_documentation(folder)
    return read.html(read.pages["page"])


def test_the_list_has_every_page_in_the_order_of_the_navigation(client: TestClient, checkout: Path) -> None:
    pages = client.get("/api/docs").json()["pages"]
    names = [page["name"] for page in pages]
    there = {path.relative_to(checkout / "docs").as_posix() for path in (checkout / "docs").rglob("*.md")}
    assert {f"{name}.md" for name in names} == there
    assert len(names) == len(set(names))
    assert pages[0] == {"name": "index", "title": "lora-trainer", "label": "Home", "section": []}
    memory = pages[names.index("memory")]
    assert (memory["title"], memory["section"]) == ("How memory is predicted", ["Explanation"])
    assert pages[names.index("captions")]["section"] == ["How-to", "Prepare the dataset"]
    assert list(dict.fromkeys(page["section"][0] for page in pages[1:])) == [
        *("Tutorials", "How-to", "Reference", "Explanation")
    ]


def test_headings_have_the_addresses_that_mkdocs_gives_them(documentation: Documentation) -> None:
    seen = 0
    for page in documentation.pages.values():
        text = (documentation.folder / f"{page.name}.md").read_text("utf-8")
        lines = re.findall(
            r"^#+ .*", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), flags=re.MULTILINE
        )
        theirs = Markdown(extensions=[TocExtension()]).convert("\n\n".join(lines))
        ids = [attributes["id"] for _, attributes in Tags(theirs).found if "id" in attributes]
        ours = [attributes["id"] for _, attributes in Tags(documentation.html(page)).found if "id" in attributes]
        assert ours == [section.heading.anchor for section in page.sections if section.heading.text]
        assert ours == ids, page.name
        seen += len(ours)
    assert seen > 300


def test_every_link_and_image_leads_somewhere(client: TestClient, documentation: Documentation) -> None:
    anchors = {
        page.name: {section.heading.anchor for section in page.sections} for page in documentation.pages.values()
    }
    links = images = 0
    for page in documentation.pages.values():
        for tag, attributes in Tags(documentation.html(page)).found:
            if tag == "img":
                images += 1
                answer = client.get(str(attributes["src"]))
                assert (answer.status_code, answer.headers["content-type"]) == (200, "image/png")
                assert attributes["alt"]
                assert int(str(attributes["width"])) > 100
            elif tag == "a" and (target := attributes.get("href")):
                links += 1
                if target.startswith("#/docs/"):
                    place = unquote(target.removeprefix("#/docs/"))
                    name, _, anchor = (place, "", "") if place in anchors else place.rpartition("/")
                    assert name in anchors, target
                    assert not anchor or anchor in anchors[name], target
                elif not target.startswith("/api/docs/files/"):
                    assert target.startswith("https://"), target
                    assert attributes["rel"] == "noopener noreferrer"
    assert links > 150
    assert images >= 6


def test_a_page_has_its_html_its_headings_and_its_neighbors(client: TestClient) -> None:
    page = client.get("/api/docs/memory").json()
    assert page["headings"][0] == {"level": 1, "text": "How memory is predicted", "anchor": "how-memory-is-predicted"}
    assert {"level": 2, "text": "Block swap", "anchor": "block-swap"} in page["headings"]
    assert '<h2 id="block-swap">Block swap</h2>' in page["html"]
    assert (page["before"], page["after"]) == ("scores", "exactness")
    assert client.get("/api/docs/index").json()["before"] is None
    tutorial = client.get("/api/docs/tutorials/first-lora").json()
    assert '<a href="#/docs/tutorials/' in tutorial["html"]
    assert '<a href="#/docs/use"' in tutorial["html"]


def test_markdown_cannot_bring_markup(tmp_path: Path) -> None:
    text = (
        '# <script>alert(1)</script> Title\n\n<img src=x onerror="alert(1)"> <b>bold</b>\n\n<script>alert(2)</script>\n\n'
        "[a](javascript:alert(1)) [b](data:text/html,x) [c](//evil.example) [d](other.md#part) [e](../../etc/passwd.md) "
        "[f](missing.md) [g](https://example.org) [h](#part) ![i](https://evil.example/x.png) ![j](../x.png)\n\n"
        "| left | right |\n|---|---:|\n| <code>a&#124;b</code> | c<br>d |\n| <code onclick=x>e</code> | <br onclick=x> |\n\n"
        '```html"onload=x\n</code><script>alert(3)</script>\n```\n'
    )
    html = in_folder(tmp_path / "docs", text)
    tags = Tags(html).found
    assert {tag for tag, _ in tags} <= set("h1 p a img table thead tbody tr th td code br pre".split())
    attributes = {name for _, found in tags for name in found}
    assert attributes <= {"id", "href", "target", "rel", "class", "src", "alt", "width", "height", "loading"}
    links = [found.get("href") for tag, found in tags if tag == "a"]
    assert [link for link in links if link] == ["#/docs/other/part", "https://example.org", "#/docs/page/part"]
    assert all("src" not in found for tag, found in tags if tag == "img")
    assert "<code>a|b</code>" in html
    assert "c<br />\nd" in html
    assert "&lt;script&gt;alert(2)" in html


def test_a_page_may_begin_without_a_heading(tmp_path: Path) -> None:
    html = in_folder(tmp_path / "docs", "some text\n\n# Page\n\n## Part\n\n## Part\n\n## 日本語\n")
    assert re.findall(r'id="([^"]*)"', html) == ["page", "part", "part_1", "_1"]
    pages = read_documentation(tmp_path / "docs").pages
    assert (pages["page"].title, pages["page"].section) == ("page", ("More",))


def test_a_changed_page_is_read_again(tmp_path: Path) -> None:
    assert "first" in in_folder(tmp_path / "docs", "# Page\n\nfirst\n")
    os.utime(tmp_path / "docs" / "page.md", (1.0, 1.0))
    assert "second" in in_folder(tmp_path / "docs", "# Page\n\nsecond\n")
    missing = read_documentation(tmp_path / "none")
    assert (missing.pages, missing.search("page")) == ({}, [])


@pytest.mark.parametrize(
    ("words", "name", "heading"),
    [
        ("lora.rank", "config", "lora"),
        ("gradient checkpointing", "config", "memory"),
        ("Out of  MEMORY", "troubleshooting", "Out of memory"),
        ("resume", "resume", ""),  # the title before headings, headings before text
        ("doctor", "doctor", ""),
        ("sdxl 12 gb", "tutorials/sdxl-12gb", ""),
        ("nan loss", "control", "A loss or gradient that is not finite"),
    ],
)
def test_a_search_finds_the_best_place_first(
    client: TestClient, documentation: Documentation, words: str, name: str, heading: str
) -> None:
    found = client.get("/api/docs", params={"search": words}).json()["found"]
    assert (found[0]["name"], found[0]["heading"]) == (name, heading)
    assert 1 <= len(found) <= 40
    for row in found:
        anchors = [section.heading.anchor for section in documentation.pages[row["name"]].sections]
        assert row["anchor"] in ["", *anchors]
        assert 0 < len(row["excerpt"]) < 400


@pytest.mark.parametrize("words", ["", " ", "zzzz", "(", "[a", "*", "\\", "memory zzzz", "<script>", "\0"])
def test_what_is_nowhere_is_not_found(client: TestClient, words: str) -> None:
    answer = client.get("/api/docs", params={"search": words})
    assert answer.status_code == 200
    assert answer.json()["search"] == words
    assert [row for row in answer.json()["found"] if words.strip() in ("", "zzzz", "memory zzzz")] == []


@pytest.mark.parametrize(
    "path",
    [
        *(
            "nothing",
            "memory.md",
            "../pyproject",
            "..%2fpyproject",
            "%2e%2e/%2e%2e/etc/passwd",
            "tutorials",
            "tutorials/",
        ),
        *("/etc/passwd", "tutorials/%2e%2e/memory", "memory%00", "MEMORY", "x" * 3000, "<b>"),
        *(
            "files/memory.md",
            "files/../mkdocs.yml",
            "files/%2e%2e/mkdocs.yml",
            "files/..%2f..%2fetc%2fpasswd",
            "files/",
        ),
        *("files//etc/passwd", "files/report.png/", "files/nothing.png", "files/report.png%00"),
    ],
)
def test_only_pages_and_their_images_are_sent(client: TestClient, path: str) -> None:
    answer = client.get(f"/api/docs/{path}")
    assert answer.status_code in (404, 405), answer.text[:200]
    assert problems_of(answer.json())


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_the_docs_cannot_be_changed(client: TestClient, method: str) -> None:
    for path in ("/api/docs", "/api/docs/memory", "/api/docs/files/report.png"):
        assert client.request(method, path).status_code == 405
    assert client.get("/api/docs", params={"search": "x" * 201}).status_code == 422


@pytest.mark.slow  # builds the wheel, and starts a server of what is in it
def test_a_wheel_contains_the_docs(tmp_path: Path, checkout: Path) -> None:
    pytest.importorskip("hatchling", reason="needs hatchling: it builds the wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=checkout, check=True, capture_output=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path / "installed")
    there = {path.relative_to(checkout / "docs") for path in (checkout / "docs").rglob("*") if path.is_file()}
    shipped = tmp_path / "installed" / "lora_trainer" / "docs_data"
    found = {path.relative_to(shipped) for path in shipped.rglob("*") if path.is_file()}
    assert found == there | {Path("mkdocs.yml")}
    program = (
        "from pathlib import Path; from lora_trainer.web.documentation import *; "
        "read = read_documentation(documentation_folder()); print(read.folder, len(read.pages), "
        "read.pages['memory'].section, 'block-swap' in read.html(read.pages['memory']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "installed")},
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    )
    pages = sum(path.suffix == ".md" for path in there)
    assert re.sub(r"\s+", " ", done.stdout.strip()) == f"{shipped} {pages} ('Explanation',) True"
