"""The page in a real browser: from an empty folder to a LoRA, at two sizes; a server that dies, other tabs, foreign words."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.at_work import at_work
from tests.page.browser import PATIENCE, browsing
from tests.web.site import write_run
from tests.web.test_serve import served

pytestmark = [
    pytest.mark.slow,  # make test-page; tests/web has what the server answers
    pytest.mark.skipif(os.name == "nt", reason="signals of POSIX"),
]
SHORT = {
    "train.max_steps": "60",
    "sample.every_n_steps": "30",
    "sample.num_inference_steps": "4",
    "gates.lora_check": "off",
}
# Inputs whose field says something about them that a screen reader does not find.
NOT_DESCRIBED = """
return [...document.querySelectorAll(".field")].filter((field) => field.querySelector("[id$='-about'] > *")
  && !field.querySelector(`[aria-describedby="${field.querySelector("[id$='-about']").id}"]`)).map((field) => field.innerText);"""
# Keeps every stream of messages that the page opens.
COUNT_STREAMS = """
window.streams = [];
window.EventSource = class extends EventSource { constructor(url) { super(url); window.streams.push(this); } };"""
HOSTILE = '<img src=x onerror="document.title=1"><script>document.title=1</script>'


def test_from_an_empty_folder_to_a_downloaded_lora(runs: Path, size: str) -> None:
    with served("--output", str(runs)) as (address, _, _), browsing(address, size) as browser:
        browser.open()
        browser.wait_for("Nothing was trained yet")
        browser.click("New run with my images")
        browser.wait_for("GiB, without a limit", 60)
        browser.wait_for("This computer has no GPU")  # the tests' machines have none
        browser.click("8 GB")
        browser.wait_for("of 8 GiB: fits", 60)
        for name, value in SHORT.items():
            browser.type("Search all settings", name)
            field = browser.field(name)
            if field.tag_name == "select":
                field.find_element("xpath", f"option[@value='{value}']").click()
            else:
                browser.type(name, value)
            browser.until(lambda name=name: browser.text.count(name) > 1, f"{name} is among the changes")
        browser.click("Refuse a dataset or a LoRA that scores below the minimum")
        browser.type("Name", "zobo")
        assert browser.overflow() <= 0
        browser.click("Start run")
        browser.wait_for("of 60", PATIENCE)
        browser.click("Save now")
        browser.until(lambda: "\ndone\n" in browser.text, "it is done", PATIENCE)
        browser.wait_for("Validation loss")
        for tab, words in {
            "Samples": "Samples step 30",
            "Log": "exported:",
            "Settings": "all settings, defaults too",
        }.items():
            browser.click(tab)
            browser.wait_for(words)
            assert browser.overflow() <= 0
        browser.click("Files")
        link = browser.element("//a[@download and text()='zobo.safetensors']").get_attribute("href")
        assert httpx.get(link).content == (runs / "zobo" / "zobo.safetensors").read_bytes()
        browser.open("verdict/zobo")
        browser.wait_for("the LoRA was not measured")
        assert browser.complaints() == []
        assert [each for each in browser.loaded() if not each.startswith(address)] == []


def test_no_page_has_a_barrier(runs: Path, size: str) -> None:
    """By axe, in light and dark: contrast, names, roles, order of headings."""
    write_run(runs / "cat", outcome="passed")
    live = write_run(runs / "now", status="running", arithmetic={"total": 90})
    with (
        at_work(live),
        served("--output", str(runs)) as (address, _, _),
        browsing(address, size) as browser,
    ):
        for scheme in ("light", "dark"):
            browser.show_in(scheme)
            for page, words in {
                "": "passed, ready to use",
                "runs": "running",
                "run/now": "Validation loss",
                "new": "base model",
                "run/cat": "Validation loss",
                "verdict/cat": "Dataset",
                "queue": "Workers",
            }.items():
                browser.open(page)
                browser.wait_for(words, 60)
                assert browser.barriers() == [], (scheme, page)
                assert browser.driver.execute_script(NOT_DESCRIBED) == []
                assert browser.overflow() <= 0


def test_a_killed_server_is_reported_and_found_again(runs: Path) -> None:
    write_run(runs / "cat")
    with served("--output", str(runs)) as (address, _, first), browsing(address, "wide") as browser:
        browser.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": COUNT_STREAMS})
        browser.open("runs")
        browser.wait_for("cat")
        first.send_signal(signal.SIGKILL)
        first.wait()
        browser.wait_for("The server does not answer")
        write_run(runs / "dog")
        port = address.rpartition(":")[2]
        command = [sys.executable, "-m", "lora_trainer", "ui", "--port", port, "--output", str(runs)]
        second = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            browser.wait_for("dog", 60)
            assert "The server does not answer" not in browser.text
            opened = "return window.streams.filter((each) => each.readyState !== EventSource.CLOSED).length"
            assert browser.driver.execute_script(opened) == 1
        finally:
            second.kill()
            second.wait()


def test_a_run_of_elsewhere_appears_in_two_tabs(runs: Path) -> None:
    write_run(runs / "cat")
    with served("--output", str(runs)) as (address, _, _), browsing(address, "wide") as browser:
        tabs = [browser.driver.current_window_handle]
        browser.open()
        browser.wait_for("cat")
        browser.driver.switch_to.new_window("tab")
        tabs.append(browser.driver.current_window_handle)
        browser.open()
        browser.wait_for("cat")
        write_run(runs / "dog")
        for tab in tabs:
            browser.driver.switch_to.window(tab)
            browser.wait_for("dog")


def test_names_and_messages_never_become_markup(runs: Path) -> None:
    write_run(runs / "cat", name=HOSTILE, reason=HOSTILE, status="failed")
    with served("--output", str(runs)) as (address, _, _), browsing(address, "wide") as browser:
        for page in ("", "runs", "run/cat", "verdict/cat"):
            browser.open(page)
            browser.wait_for(HOSTILE)
            assert browser.driver.title != "1"
            assert browser.driver.find_elements("xpath", "//main//img[@onerror]|//main//script") == []
        browser.open("run/cat")
        browser.click("Events")
        browser.wait_for("<b>waited</b>")


def test_numbers_with_a_comma_are_understood(runs: Path) -> None:
    with served("--output", str(runs)) as (address, _, _), browsing(address, "wide", language="de-DE") as browser:
        browser.open("new")
        browser.wait_for("GiB", 60)
        browser.type("Search all settings", "optimizer.learning_rate")
        browser.type("optimizer.learning_rate", "0,0005")
        browser.wait_for("0.0005", 60)
        browser.type("optimizer.learning_rate", "0,5x")
        browser.wait_for("is no number")
        browser.click("Start run")  # no earlier value is used in its place
        browser.element("//section[@aria-label='Start']//*[@role='alert']")
        assert list(runs.glob("*/run.json")) == []


def test_problems_stand_at_their_fields(runs: Path) -> None:
    with served("--output", str(runs)) as (address, _, _), browsing(address, "phone") as browser:
        browser.open("new")
        browser.wait_for("GiB", 60)
        browser.type("Search all settings", "lora.rank")
        browser.type("lora.rank", "0")
        about = browser.element("//div[contains(@class, 'field') and contains(@class, 'wrong')]")
        browser.until(lambda: "lora.rank" in about.text and "at least 1" in about.text, "the problem is at the field")
        browser.click("Start run")
        browser.until(lambda: browser.text.count("lora.rank = 0") >= 2, "the run is refused")
        assert not (runs / "builtin").exists()
        assert list(runs.glob("*/run.json")) == []
