"""The page of a new run: differences and presets of one's own, another trainer's config, settings that are a word or a number."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import pytest

from tests.page.browser import browsing
from tests.web.test_serve import served

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.name == "nt", reason="signals of POSIX"),
]


def test_settings_are_saved_as_a_preset_taken_back_and_imported(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    with served("--output", str(runs)) as (address, _, _), browsing(address, "wide") as browser:
        browser.open("new")
        browser.wait_for("no GPU here: CPU", 60)
        start = browser.element("//button[normalize-space(.)='Start run']")
        assert start.rect["y"] + start.rect["height"] < 900  # it is seen without scrolling
        browser.type("Search all settings", "lora.rank")
        browser.type("lora.rank", "8")
        browser.wait_for("instead of", 60)
        browser.click("Save as preset")
        browser.until(lambda: browser.driver.find_elements("css selector", "dialog[open]"), "the dialog is open")
        name = browser.element("//dialog//input")
        name.send_keys("small")
        browser.click("Save")
        browser.wait_for("saved preset small", 60)  # where the value comes from now
        assert tomllib.loads((runs / ".ui" / "presets" / "small.toml").read_text("utf-8")) == {"lora": {"rank": 8}}
        browser.click("Import a config")
        browser.element("//dialog//textarea").send_keys("network_dim = 24\nnetwork_alpha = 12\n")
        browser.click("Read")
        browser.wait_for("Read as", 60)
        browser.click("Use these settings")
        browser.until(lambda: browser.field("lora.rank").get_attribute("value") == "24", "it is in its field")
        browser.type("lora.rank", "16")
        browser.until(lambda: "16 instead of 64" in browser.text.replace("\n", " "), "it differs from the presets", 60)
        browser.click("Take all back")
        browser.until(lambda: browser.field("lora.rank").get_attribute("value") == "", "it is taken back")


def test_a_setting_of_words_or_numbers_takes_both(tmp_path: Path) -> None:
    with served("--output", str(tmp_path / "runs")) as (address, _, _), browsing(address, "phone") as browser:
        browser.open("new")
        browser.wait_for("GiB", 60)
        name = "memory.gradient_checkpointing"
        browser.type("Search all settings", name)
        for text, shown in (("3", "3 of 12 blocks"), ("true", "12 of 12 blocks"), ("auto", "0 of 12 blocks")):
            browser.type(name, text)
            browser.wait_for(shown, 60)
        start = browser.element("//button[normalize-space(.)='Start run']")
        top = browser.driver.execute_script("return arguments[0].getBoundingClientRect().bottom", start)
        assert top < 844  # in reach of the thumb wherever one reads
        assert browser.complaints() == []
