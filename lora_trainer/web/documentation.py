"""The pages of docs/ as HTML, and a search in them: what the wheel ships, or the folder of a checkout."""

from __future__ import annotations

import html
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Any
from urllib.parse import quote

import yaml
from markdown_it import MarkdownIt
from markdown_it.rules_inline import StateInline
from markdown_it.token import Token as Mark
from PIL import Image

from lora_trainer.config.toml import setting_names

NAVIGATION = "mkdocs.yml"
OTHERS = "More"  # the section of pages that the navigation does not name
FILES = "/api/docs/files/"
KNOWN_TAGS = re.compile(r"<br ?/?>|<code>([^<>\n]*)</code>")
MOST_FOUND, MOST_OF_A_PAGE = 40, 3
AROUND = 90  # characters of an excerpt on each side of the first word
TITLE, TERM, HEADING, PHRASE, BODY = 100, 40, 30, 20, 10  # weights of the places of a word, and of all in a row
LONG = 2000  # characters of a section in which a word counts half


def known_tags(state: StateInline, silent: bool) -> bool:
    """`<br>`, and `<code>` around plain text: the two tags that our tables need. All others stay text."""
    found = KNOWN_TAGS.match(state.src, state.pos)
    if found is None:
        return False
    if not silent:
        mark = state.push("hardbreak" if found[1] is None else "code_inline", "code" if found[1] else "br", 0)
        mark.content = html.unescape(found[1] or "")
    state.pos = found.end()
    return True


MARKDOWN = MarkdownIt("commonmark", {"html": False}).enable("table")
MARKDOWN.inline.ruler.before("html_inline", "known_tags", known_tags)


@dataclass(frozen=True)
class Heading:
    """A heading; `anchor` is its id in the HTML, the one that mkdocs gives it."""

    level: int
    text: str
    anchor: str


@dataclass(frozen=True)
class DocsSection:
    """The text below a heading, without markup; `terms` begin the rows of its tables, such as names of settings."""

    heading: Heading
    text: str
    terms: frozenset[str]


@dataclass(frozen=True)
class DocsPage:
    """A page, its place in the navigation, and its text by headings."""

    name: str
    title: str
    label: str
    section: tuple[str, ...]
    sections: tuple[DocsSection, ...]


@dataclass(frozen=True)
class Documentation:
    """The pages in the order of the navigation, and the images that they show."""

    folder: Path
    pages: Mapping[str, DocsPage]
    images: Mapping[str, Path]

    def html(self, page: DocsPage) -> str:
        """The page as HTML. Its Markdown cannot bring markup, addresses or styles of its own."""
        marks = MARKDOWN.parse((self.folder / f"{page.name}.md").read_text("utf-8"))
        anchors = (section.heading.anchor for section in page.sections if section.heading.anchor)
        for mark in marks:
            if mark.type == "heading_open":
                mark.attrSet("id", next(anchors, ""))
            elif mark.type in ("th_open", "td_open") and "right" in str(mark.attrs.pop("style", "")):
                mark.attrJoin("class", "number")  # a style would be refused by the page's security policy
            for child in mark.children or ():
                self._resolve(page, child)
        return str(MARKDOWN.renderer.render(marks, MARKDOWN.options, {}))

    def _resolve(self, page: DocsPage, mark: Mark) -> None:
        """Make a link lead to a page of the server or to another site, and an image come from the server."""
        if mark.type == "image":
            shown = self.images.get(beside(page.name, str(mark.attrs.pop("src", ""))))
            if shown is not None:
                with Image.open(shown) as image:  # with its size the text does not move when it comes
                    mark.attrs |= {"width": image.width, "height": image.height}
                mark.attrSet("src", FILES + quote(shown.relative_to(self.folder).as_posix()))
            mark.attrs["loading"] = "lazy"
        elif mark.type == "link_open":
            target = str(mark.attrs.pop("href", ""))
            if target.startswith(("https://", "http://")):
                mark.attrs |= {"href": target, "target": "_blank", "rel": "noopener noreferrer"}
                return
            file, _, anchor = target.partition("#")
            path = beside(page.name, file) if file else f"{page.name}.md"
            if path in self.images:
                mark.attrSet("href", FILES + quote(path))
            elif (name := path.removesuffix(".md")) in self.pages and path.endswith(".md"):
                mark.attrSet("href", "#/docs/" + quote(f"{name}/{anchor}" if anchor else name))

    def search(self, words: str) -> list[dict[str, Any]]:
        """The sections with all of the words, those with them in titles and headings first."""
        wanted = words.casefold().split()
        phrase = re.compile(r"[\s_.-]+".join(map(re.escape, wanted)))
        found = list[tuple[float, dict[str, Any]]]()
        for page in self.pages.values() if wanted else ():
            for index, section in enumerate(page.sections):
                points = points_of(page, section, wanted, phrase)
                if not points:
                    continue
                row = {
                    "name": page.name,
                    "title": page.title,
                    "heading": section.heading.text if index else "",
                    "anchor": section.heading.anchor if index else "",
                    "excerpt": excerpt(section.text, wanted, phrase),
                }
                found.append((points, row))
        found.sort(key=lambda each: -each[0])
        shown, rows = Counter[str](), list[dict[str, Any]]()
        for _, row in found:
            shown[row["name"]] += 1
            if shown[row["name"]] <= MOST_OF_A_PAGE:
                rows.append(row)
        return rows[:MOST_FOUND]


def points_of(page: DocsPage, section: DocsSection, wanted: Sequence[str], phrase: re.Pattern[str]) -> float:
    """How well a section answers a search; 0 where it lacks a word. Words count where one begins: `of` is not in `proof`."""
    is_first = section is page.sections[0]
    title, heading = f"{page.name} {page.title} {page.label}".casefold(), section.heading.text.casefold()
    body, points, is_here = section.text.casefold(), 0.0, False
    for word in wanted:
        begins = re.compile(f"(?<![^\\W_]){re.escape(word)}")
        count = len(begins.findall(body))
        found = HEADING * (begins.search(heading) is not None) + BODY * count / (1 + count + len(body) / LONG)
        in_title = begins.search(title) is not None
        if not found and not in_title:
            return 0.0
        points += found + TITLE * (is_first and in_title)
        is_here |= (
            found > 0 or is_first
        )  # a word of the title is in all sections, but only the first is found by it alone
    if len(wanted) > 1:
        points += PHRASE * sum(phrase.search(text) is not None for text in (heading, body))
    named = [term for term in section.terms if phrase.fullmatch(term) or phrase.fullmatch(term.rpartition(".")[2])]
    if named:  # our own settings before the keys of other trainers
        points += TERM if set(named) & set(setting_names()) else TERM / 2
    return points if is_here else 0.0


def documentation_folder() -> Path:
    """Where the pages are: inside an installed package, beside the package in a checkout."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "docs_data"
    return inside if inside.is_dir() else package.parent / "docs"


def read_documentation(folder: Path) -> Documentation:
    """The pages of a folder; read again only when a file there has changed."""
    beside_it = folder / NAVIGATION
    navigation = beside_it if beside_it.is_file() else folder.parent / NAVIGATION
    files = sorted(each for each in (navigation, *folder.rglob("*.md"), *folder.rglob("*.png")) if each.is_file())
    return _read(folder, navigation, tuple((each, each.stat().st_mtime_ns) for each in files))


@lru_cache(maxsize=2)
def _read(folder: Path, navigation: Path, files: Sequence[tuple[Path, int]]) -> Documentation:
    paths = {path.relative_to(folder).as_posix(): path for path, _ in files if path.is_relative_to(folder)}
    tree = yaml.safe_load(navigation.read_text("utf-8"))["nav"] if navigation.is_file() else []
    places = {name: (label, section) for name, label, section in listed(tree)}
    names = [*places, *(name for name in paths if name.endswith(".md") and name not in places)]
    pages = {}
    for name in (each for each in names if each in paths):
        sections = tuple(sections_of(paths[name].read_text("utf-8")))
        title = sections[0].heading.text or name.removesuffix(".md")
        label, section = places.get(name, (title, (OTHERS,)))
        pages[name.removesuffix(".md")] = DocsPage(name.removesuffix(".md"), title, label, section, sections)
    return Documentation(folder, pages, {name: path for name, path in paths.items() if name.endswith(".png")})


def listed(tree: object, label: str = "", section: tuple[str, ...] = ()) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """File, label and section of each page in mkdocs' navigation: titles with a file, or with a list of more."""
    if isinstance(tree, str):
        yield tree, label, section
    elif isinstance(tree, dict):
        for name, below in tree.items():
            yield from listed(below, str(name), section)
    elif isinstance(tree, list):
        for each in tree:
            yield from listed(each, label, (*section, label) if label else section)


def sections_of(text: str) -> Iterator[DocsSection]:
    """The text of a page by its headings; what stands before the first one has a heading without text."""
    used = set[str]()
    heading, parts, terms = Heading(1, "", ""), list[str](), set[str]()
    marks = MARKDOWN.parse(text)
    for index, mark in enumerate(marks):
        if mark.type == "heading_open":
            if heading.text or parts:
                yield DocsSection(heading, " ".join(parts), frozenset(terms))
            words = plain(marks[index + 1])
            heading, parts, terms = Heading(int(mark.tag[1:]), words, anchor_of(words, used)), [], set()
        elif mark.type in ("fence", "code_block"):
            parts.append(mark.content)
        elif mark.type == "inline" and marks[index - 1].type != "heading_open":
            parts.append(plain(mark))
            if marks[index - 1].type == "td_open" and marks[index - 2].type == "tr_open":
                terms.add(parts[-1].casefold())
    yield DocsSection(heading, " ".join(parts), frozenset(terms))


def plain(mark: Mark) -> str:
    """The words of a line, without its markup."""
    return "".join(
        " " if child.type in ("softbreak", "hardbreak") else child.content for child in mark.children or ()
    ).strip()


def anchor_of(heading: str, used: set[str]) -> str:
    """A heading's id as mkdocs makes it: the same addresses lead to the same places here and there."""
    ascii_only = unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode()
    anchor = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", ascii_only).strip().lower())
    while not anchor or anchor in used:
        numbered = re.fullmatch(r"(.*)_(\d+)", anchor)
        anchor = f"{numbered[1]}_{int(numbered[2]) + 1}" if numbered else f"{anchor}_1"
    used.add(anchor)
    return anchor


def beside(name: str, target: str) -> str:
    """A relative target on the page `name`, as a path below the folder of the pages."""
    return str(normpath(PurePosixPath(name).parent / target))


def excerpt(text: str, wanted: Sequence[str], phrase: re.Pattern[str]) -> str:
    """The words around the first place of all words in a row, or of one of them."""
    text = " ".join(text.split())
    small = text.casefold()
    places = (at for word in wanted if (at := small.find(word)) >= 0)
    first = found.start() if (found := phrase.search(small)) else min(places, default=0)
    start, end = max(0, first - AROUND), min(len(text), first + 2 * AROUND)
    start = text.find(" ", start, first) + 1 if start else 0
    end = max(text.rfind(" ", first, end), first) if end < len(text) else end
    return f"{'… ' if start else ''}{text[start:end]}{' …' if end < len(text) else ''}"
