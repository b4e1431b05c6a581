"""The page of datasets in a real browser: a grid of thousands, captions and their undo, two tabs, a copy, foreign words."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
from PIL import Image

from tests.page.browser import Browser, browsing
from tests.web.test_serve import served

pytestmark = [
    pytest.mark.slow,  # make test-page; tests/web has what the server answers
    pytest.mark.skipif(os.name == "nt", reason="signals of POSIX"),
]
HOSTILE = '<img src=x onerror="document.title=1"><script>document.title=1</script>'
MANY = 3000
MOST_NODES = 6000  # of the whole page; a tile has 12


def write_images(folder: Path, captions: dict[str, str | None]) -> Path:
    folder.mkdir(parents=True)
    for number, (name, caption) in enumerate(captions.items()):
        Image.new("RGB", (600 + 40 * number, 560), (40, 90 + number, 120)).save(folder / f"{name}.png")
        if caption is not None:
            (folder / f"{name}.txt").write_text(caption + "\n", encoding="utf-8")
    return folder


@contextmanager
def page_of(tmp_path: Path, size: str = "wide") -> Iterator[Browser]:
    """A browser at the page of a server whose datasets are in `datasets`, and which reads `images`."""
    (tmp_path / "images").mkdir(exist_ok=True)
    flags = ("--output", str(tmp_path / "runs"), "--datasets", str(tmp_path / "datasets"))
    with (
        served(*flags, "--root", str(tmp_path / "images")) as (address, _, _),
        browsing(address, size) as browser,
    ):
        yield browser


def open_dataset(browser: Browser, folder: Path, words: str) -> None:
    browser.open(f"datasets/{quote(str(folder), safe='')}")
    browser.wait_for(words, 60)


def open_image(browser: Browser, name: str) -> None:
    browser.element(f"//button[@class='tile-open'][starts-with(@aria-label, '{name}')]").click()
    browser.field("Caption")


def keys(browser: Browser, element: object, *pressed: str) -> None:
    from selenium.webdriver import ActionChains, Keys

    chain = ActionChains(browser.driver).click(element)  # type: ignore[arg-type]
    for each in pressed[:-1]:
        chain = chain.key_down(getattr(Keys, each))
    chain = chain.send_keys(getattr(Keys, pressed[-1], pressed[-1]))
    for each in pressed[:-1]:
        chain = chain.key_up(getattr(Keys, each))
    chain.perform()


def type_caption(browser: Browser, text: str) -> None:
    field = browser.field("Caption")
    field.clear()
    field.send_keys(text)
    keys(browser, field, "CONTROL", "ENTER")


def test_captions_are_edited_and_taken_back(tmp_path: Path, size: str) -> None:
    own = write_images(tmp_path / "datasets" / "own", {"a": "sks, cat, red", "b": "dog", "c": None})
    with page_of(tmp_path, size) as browser:
        browser.open("datasets")
        browser.element("//a[contains(@class, 'dataset')][.//*[text()='own']]").click()
        browser.wait_for("missing caption", 60)
        assert browser.overflow() <= 0
        open_image(browser, "a.png")
        type_caption(browser, "sks, cat, blue")
        browser.until(lambda: (own / "a.txt").read_text("utf-8") == "sks, cat, blue\n", "it is saved")
        browser.click("Remove cat")
        browser.until(lambda: (own / "a.txt").read_text("utf-8") == "sks, blue\n", "the tag is gone")
        assert browser.overflow() <= 0
        keys(browser, browser.field("Caption"), "ALT", "ARROW_DOWN")
        browser.until(lambda: browser.field("Caption").get_attribute("value") == "dog", "the next one is open")
        browser.field("Caption").send_keys(" at night")
        browser.click("Close")  # which leaves the field
        browser.until(lambda: (own / "b.txt").read_text("utf-8") == "dog at night\n", "it is saved")
        if size == "phone":
            browser.click("View and edit captions")
        for _ in range(3):
            browser.click("Undo")
            browser.wait_for("Undone")
        assert [(own / f"{name}.txt").read_text("utf-8") for name in "ab"] == ["sks, cat, red\n", "dog\n"]
        browser.click("Redo")
        browser.until(lambda: (own / "a.txt").read_text("utf-8") == "sks, cat, blue\n", "it is made again")
        browser.click("Trigger word")
        browser.type("Trigger word", "sks")
        browser.wait_for("Changes 2 captions")
        assert browser.overflow() <= 0
        browser.click("Change")
        browser.wait_for("2 captions changed")
        assert (own / "c.txt").read_text("utf-8") == "sks\n"
        browser.until(lambda: "missing caption" not in browser.text, "no caption is missing now")
        assert [each for each in browser.complaints() if "favicon" not in each] == []


def test_no_page_of_datasets_has_a_barrier(tmp_path: Path, size: str) -> None:
    """By axe, in light and dark: contrast, names, roles, order of headings."""
    own = write_images(tmp_path / "datasets" / "own", {"a": "sks, cat, red", "b": "dog", "c": None})
    with page_of(tmp_path, size) as browser:

        def look(where: str) -> None:
            assert browser.barriers() == [], where

        for scheme in ("light", "dark"):
            browser.show_in(scheme)
            browser.open("datasets")
            browser.wait_for("own")
            look(f"list, {scheme}")
            open_dataset(browser, own, "no caption")
            browser.element("//input[@aria-label='Select b.png']").click()
            open_image(browser, "a.png")
            look(f"images, {scheme}")
            browser.click("Close")
            if size == "phone":
                browser.click("View and edit captions")
            browser.click("Find and replace")
            browser.type("Find", "o")
            browser.wait_for("Changes 1 caption")
            look(f"find and replace, {scheme}")
            browser.click("Cancel")


def test_two_tabs_never_overwrite_each_other(tmp_path: Path) -> None:
    own = write_images(tmp_path / "datasets" / "own", {"a": "sks, cat, red", "b": "dog"})
    with page_of(tmp_path) as browser:
        tabs = [browser.driver.current_window_handle]
        open_dataset(browser, own, "sks, cat, red")
        open_image(browser, "a.png")
        browser.driver.switch_to.new_window("tab")
        tabs.append(browser.driver.current_window_handle)
        open_dataset(browser, own, "sks, cat, red")
        open_image(browser, "a.png")
        browser.field("Caption").send_keys(" of the second")
        changes = [{"name": "a.png", "caption": "of the first", "before": "sks, cat, red"}]
        answer = httpx.post(f"{browser.address}/api/datasets/captions", json={"path": str(own), "changes": changes})
        assert answer.status_code == 200
        keys(browser, browser.field("Caption"), "CONTROL", "ENTER")
        browser.wait_for("changed by somebody else")
        assert (own / "a.txt").read_text("utf-8") == "of the first\n"
        browser.click("Save mine over it")
        browser.until(lambda: "of the second" in (own / "a.txt").read_text("utf-8"), "mine is saved")
        browser.driver.switch_to.window(tabs[0])  # which shows it by itself
        browser.until(
            lambda: "of the second" in browser.field("Caption").get_attribute("value"), "the other tab has it"
        )
        browser.click("Undo")
        browser.until(lambda: (own / "a.txt").read_text("utf-8") == "of the first\n", "it is taken back")


def test_thousands_of_images_scroll_to_their_end(tmp_path: Path, size: str) -> None:
    own = write_images(tmp_path / "datasets" / "own", {"0000": "number 0"})
    for number in range(1, MANY):
        os.link(own / "0000.png", own / f"{number:04}.png")
        (own / f"{number:04}.txt").write_text(f"number {number}\n", encoding="utf-8")
    with page_of(tmp_path, size) as browser:
        open_dataset(browser, own, "3,000 images")
        browser.wait_for("number 3")

        def nodes() -> int:
            found: int = browser.driver.execute_script("return document.querySelectorAll('*').length")
            return found

        for place in (0.3, 0.7, 1.0):
            browser.driver.execute_script(f"window.scrollTo(0, {place} * document.documentElement.scrollHeight)")
            browser.until(
                lambda: browser.driver.execute_script(
                    "return !document.querySelector('.tile.loading') && document.querySelectorAll('.tile').length > 0"
                ),
                "what is shown is loaded",
            )
            assert nodes() < MOST_NODES
        browser.wait_for(f"number {MANY - 1}")
        browser.driver.execute_script("window.scrollTo(0, 0)")
        cell = browser.element("//*[@role='gridcell'][@data-index='0']")
        browser.driver.execute_script("arguments[0].focus()", cell)
        from selenium.webdriver import ActionChains, Keys

        ActionChains(browser.driver).key_down(Keys.CONTROL).send_keys(Keys.END).key_up(Keys.CONTROL).perform()
        browser.until(
            lambda: browser.driver.execute_script("return document.activeElement.dataset.index") == str(MANY - 1),
            "the last one has the focus",
        )
        ActionChains(browser.driver).send_keys(" ").perform()
        browser.wait_for("1 selected")
        ActionChains(browser.driver).key_down(Keys.CONTROL).send_keys("a").key_up(Keys.CONTROL).perform()
        browser.wait_for("3,000 selected")
        assert browser.overflow() <= 0
        assert nodes() < MOST_NODES


def test_captions_never_become_markup(tmp_path: Path) -> None:
    own = write_images(tmp_path / "datasets" / "own", {"a": f"{HOSTILE}, cat", "b": "dog"})
    os.rename(own / "b.png", own / "<b>b.png")
    with page_of(tmp_path) as browser:
        open_dataset(browser, own, HOSTILE)
        open_image(browser, "a.png")
        type_caption(browser, f"{HOSTILE}, dog")
        browser.until(lambda: "dog" in (own / "a.txt").read_text("utf-8"), "it is saved")
        browser.click("Find and replace")
        browser.type("Find", "<script>")
        browser.wait_for("Changes 1 caption")
        browser.wait_for("<b>b.png")
        assert browser.driver.title != "1"
        assert (
            browser.driver.find_elements("xpath", "//main//img[@onerror]|//main//script|//main//b[text()='b.png']")
            == []
        )


def test_images_of_somebody_are_copied_to_be_edited_and_trained(tmp_path: Path) -> None:
    theirs = write_images(tmp_path / "images" / "theirs", {"a": "sks, cat, red", "b": "dog"})
    before = {path.name: path.read_bytes() for path in theirs.iterdir()}
    with page_of(tmp_path) as browser:
        browser.open("datasets")
        browser.wait_for("None yet")
        browser.type("Open images", str(theirs))
        browser.click("Open")
        browser.wait_for("only read", 60)
        open_image(browser, "a.png")
        assert browser.field("Caption").get_attribute("readonly")
        browser.click("Edit a copy")
        browser.type("Name", "mine")
        browser.click("Copy")
        browser.wait_for("Open mine", 120)
        browser.click("Open mine")
        browser.wait_for("Trigger word", 60)
        open_image(browser, "a.png")
        type_caption(browser, "new")
        copied = tmp_path / "datasets" / "mine"
        browser.until(lambda: (copied / "a.txt").read_text("utf-8") == "new\n", "it is saved")
        browser.click("Check")
        browser.wait_for("Checked: score", 120)
        browser.click("Train on this")
        browser.wait_for("Base model and images", 60)
        assert browser.field("Images").get_attribute("value") == str(copied)
    assert {path.name: path.read_bytes() for path in theirs.iterdir()} == before
