"""The start page and the list of runs: the first step with one click, and a thousand runs by mouse and keys."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.page.browser import PATIENCE, SIZES, Browser, browsing
from tests.web.site import write_run
from tests.web.test_serve import served

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.name == "nt", reason="signals of POSIX"),
]
MANY = 1000


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a thousand runs, the newest of which is run-1000."""
    runs = tmp_path_factory.mktemp("many") / "runs"
    first = write_run(runs / "run-0001", steps=3, outcome="passed")
    record = json.loads((first / "run.json").read_text("utf-8"))
    for number in range(2, MANY + 1):
        folder = shutil.copytree(first, runs / f"run-{number:04}")
        changed = {**record, "name": folder.name, "started": 1000.0 + number}
        (folder / "run.json").write_text(json.dumps(changed), encoding="utf-8")
    return runs


def pressed(browser: Browser, *keys: str) -> Any:
    for key in keys:
        browser.driver.switch_to.active_element.send_keys(key)
    return browser.driver.switch_to.active_element


def test_the_built_in_example_begins_with_one_click(tmp_path: Path) -> None:
    from selenium.webdriver import ActionChains

    with served("--output", str(tmp_path / "runs")) as (address, _, _), browsing(address, "wide") as browser:
        browser.open()
        browser.wait_for("Nothing was trained yet")
        button = browser.element("//button[normalize-space(.)='Train the built-in example']")
        ActionChains(browser.driver).double_click(button).perform()  # as people do, and yet it is one run
        browser.wait_for("Validation loss", PATIENCE)
        browser.click("Start")
        focused = "return document.activeElement.tagName + document.activeElement.textContent"
        browser.until(lambda: browser.driver.execute_script(focused) == "H1Start", "the heading is focused")
        browser.wait_for(" of 880", PATIENCE)
        browser.wait_for("System memory")
        assert [row["id"] for row in httpx.get(f"{address}/api/runs").json()["runs"]] == ["demo"]
        browser.click("Stop demo")
        browser.wait_for("Nothing trains now", PATIENCE)
        assert browser.complaints() == []


@pytest.mark.parametrize("size", SIZES)
def test_a_thousand_runs_are_listed_and_scrolled(many: Path, size: str) -> None:
    with served("--output", str(many)) as (address, _, _), browsing(address, size) as browser:
        script = browser.driver.execute_script
        browser.open("runs")
        browser.wait_for("1,000 in all", 60)
        browser.wait_for("run-1000")
        assert script("return document.querySelector('[role=grid]').getAttribute('aria-rowcount')") == "1000"
        script("window.scrollTo(0, document.documentElement.scrollHeight)")
        browser.wait_for("run-0001")
        assert "run-1000" not in browser.text
        assert script("return document.querySelectorAll('[role=row]').length") < 40
        assert browser.overflow() <= 0
        browser.click("run-0003")
        browser.element("//h1[normalize-space(.)='run-0003']")
        browser.driver.back()  # to where one was
        browser.wait_for("run-0003")
        assert script("return window.scrollY") > 10_000
        browser.element("//input[@aria-label='Search runs']").send_keys("run-05 passed")
        browser.wait_for("100 of 1,000")
        assert browser.complaints() == []


def test_pages_that_were_left_take_no_connection(tmp_path: Path) -> None:
    """A browser opens six to one server, and keeps pages for going back."""
    write_run(tmp_path / "cat")
    with served("--output", str(tmp_path)) as (address, _, _), browsing(address, "wide") as browser:
        for _ in range(8):
            browser.open("runs")
            browser.wait_for("1 in all")


def test_the_list_of_runs_is_used_by_keys_alone(many: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    with served("--output", str(many)) as (address, _, _), browsing(address, "wide") as browser:
        browser.open("runs")
        browser.wait_for("1,000 in all", 60)
        browser.driver.execute_script("document.querySelector('[role=grid] [tabindex=\"0\"]').focus()")
        assert "run-1000" in pressed(browser).text
        assert "run-0999" in pressed(browser, Keys.ARROW_DOWN).text
        pressed(browser, Keys.SPACE)
        assert "run-0001" in pressed(browser, Keys.END).text
        assert browser.driver.switch_to.active_element.rect["y"] > 10_000
        pressed(browser, Keys.PAGE_UP, Keys.HOME, Keys.SPACE)
        browser.click("Compare 2")
        browser.wait_for("Validation loss")
        browser.until(lambda: browser.text.count("run-1000") >= 2, "the curves of both are shown")
        browser.driver.back()
        browser.wait_for("1,000 in all")
        browser.driver.execute_script("document.querySelector('[role=grid] [tabindex=\"0\"]').focus()")
        pressed(browser, Keys.ARROW_DOWN, Keys.ENTER)
        browser.element("//h1[normalize-space(.)='run-0999']")
        browser.until(
            lambda: browser.driver.execute_script("return document.activeElement.tagName") == "H1",
            "the heading has focus",
        )
