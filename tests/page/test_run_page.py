"""The page of a run: resume with other settings, dialogs that are refused, long runs, samples of the base model alone."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path

import httpx
import pytest

from lora_trainer.run_folder.progress import Progress
from tests.at_work import at_work
from tests.page.browser import PATIENCE, browsing
from tests.web.site import write_lines, write_run
from tests.web.test_serve import served

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.name == "nt", reason="signals of POSIX"),
]


def test_a_run_is_resumed_with_a_changed_choice(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    write_run(runs / "cat", status="stopped", outcome=None, scores={})
    with served("--output", str(runs)) as (address, _, _), browsing(address, "phone") as browser:
        browser.open("run/cat")
        browser.click("Resume")
        browser.type("Find a setting to change", "lora.rank")
        browser.wait_for("No other setting that may change")  # it is fixed
        browser.type("Find a setting to change", "lr_scheduler.name")
        choice = browser.field("lr_scheduler.name")
        assert choice.tag_name == "select"
        choice.find_element("xpath", "option[@value='linear']").click()
        browser.type("Find a setting to change", "train.max_steps")
        browser.type("train.max_steps", "soon")
        buttons = browser.driver.find_elements("xpath", "//dialog//button[normalize-space(.)='Resume']")
        buttons[0].click()
        browser.until(lambda: not buttons[0].is_enabled(), "it is checked")
        browser.until(buttons[0].is_enabled, "it is refused", 60)
        assert browser.text.count("is no number") == 1  # at its field alone
        browser.type("train.max_steps", "90")
        buttons[0].click()
        browser.until(lambda: not browser.driver.find_elements("css selector", "dialog"), "it is resumed", 60)
        config = tomllib.loads((runs / ".ui" / "configs" / "cat.toml").read_text("utf-8"))
        assert (config["lr_scheduler"]["name"], config["train"]["max_steps"]) == ("linear", 90)
        browser.wait_for("Stop", PATIENCE)
        httpx.post(f"{address}/api/runs/cat/stop", timeout=30)
        browser.wait_for("Resume", PATIENCE)


def test_a_refused_request_keeps_its_dialog_open(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "now", status="running", arithmetic={"total": 90})
    with (
        at_work(folder),
        served("--output", str(tmp_path)) as (address, _, _),
        browsing(address, "wide") as browser,
    ):
        browser.open("run/now")
        browser.click("Change prompts")
        label = "Prompts, one on each line"
        browser.type(label, "\n".join(f"cat {number}" for number in range(17)))
        browser.click("Use these")
        browser.element("//dialog//*[@role='alert']")
        browser.type(label, "a cat")
        browser.click("Use these")
        browser.wait_for("It is done after the step")
        assert json.loads((folder / "requests" / "1.json").read_text("utf-8"))["prompts"] == ["a cat"]
        assert browser.driver.switch_to.active_element.text == "Change prompts"  # focus is where it was


def test_curves_of_a_long_run_are_thinned_again_while_news_come(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "now", status="running", steps=3000, arithmetic={"total": 9000})
    with (
        at_work(folder, Progress("training", 3000, 9000)) as progress,
        served("--output", str(tmp_path)) as (address, _, _),
        browsing(address, "wide") as browser,
    ):
        browser.open("run/now")
        browser.wait_for("step\n3,000 of 9,000")
        for first in (3001, 3301):
            rows = [{"step": step, "loss": 0.1, "seconds": 0.1} for step in range(first, first + 300)]
            with open(folder / "metrics.jsonl", "a", encoding="utf-8") as file:
                file.write("".join(json.dumps(row) + "\n" for row in rows))
            progress.show(Progress("training", first + 299, 9000))
            browser.wait_for(f"step\n{first + 299:,} of 9,000")
        fetched = lambda: sum("/metrics" in each for each in browser.loaded())  # noqa: E731
        browser.until(lambda: fetched() == 2, "the server thins all of them")
        label = browser.element("//*[@role='img' and contains(@aria-label, 'Loss over steps')]")
        values = lambda: label.get_attribute("aria-label").split("loss: ")[1].split()[0]  # noqa: E731
        browser.until(lambda: int(values()) <= 2100, f"{values()} values are drawn")


def test_keys_move_between_the_parts_of_a_run(tmp_path: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    folder = write_run(tmp_path / "cat")
    for path in (folder / "samples").glob("*_with.png"):
        path.unlink()
    write_lines(folder / "events.jsonl", [])
    with served("--output", str(tmp_path)) as (address, _, _), browsing(address, "wide") as browser:
        browser.open("run/cat")
        browser.click("Curves")
        shown = lambda: browser.driver.switch_to.active_element.text  # noqa: E731
        for key, tab in ((Keys.END, "Files"), (Keys.ARROW_RIGHT, "Curves"), (Keys.ARROW_RIGHT, "Samples")):
            browser.driver.switch_to.active_element.send_keys(key)
            browser.until(lambda tab=tab: shown() == tab, f"{tab} is open")
        browser.wait_for("Samples step 20")  # of the base model alone
        browser.driver.switch_to.active_element.send_keys(Keys.HOME)
        browser.until(lambda: shown() == "Curves", "the first is open")
