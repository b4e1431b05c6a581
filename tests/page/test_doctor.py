"""Doctor in a real browser: a check of this machine and of a run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.page.browser import PATIENCE, browsing
from tests.web.site import write_run
from tests.web.test_serve import served

pytestmark = [
    pytest.mark.slow,  # make test-page; tests/web has what the server answers
    pytest.mark.skipif(os.name == "nt", reason="signals of POSIX"),
]
# NVML of a machine with one GPU that heat has slowed down.
NVML = """
from types import SimpleNamespace
NVML_TEMPERATURE_GPU = NVML_CLOCK_SM = 0
nvmlInit = lambda: None
nvmlDeviceGetCount = lambda: 1
nvmlDeviceGetHandleByIndex = lambda index: index
nvmlDeviceGetName = lambda handle: "NVIDIA GeForce RTX 4090"
nvmlDeviceGetMemoryInfo = lambda handle: SimpleNamespace(used=18 * 2**30, total=24 * 2**30)
nvmlDeviceGetUtilizationRates = lambda handle: SimpleNamespace(gpu=97)
nvmlDeviceGetTemperature = lambda handle, kind: 91
nvmlDeviceGetPowerUsage = lambda handle: 250_000
nvmlDeviceGetEnforcedPowerLimit = lambda handle: 450_000
nvmlDeviceGetClockInfo = lambda handle, kind: 1400
nvmlDeviceGetMaxClockInfo = lambda handle, kind: 3105
nvmlDeviceGetCurrentClocksThrottleReasons = lambda handle: 0x20
"""
COPIED = "window.copied = []; navigator.clipboard.writeText = async (text) => { window.copied.push(text); };"


def test_this_machine_and_a_run_are_checked(runs: Path, size: str) -> None:
    write_run(runs / "cat")
    write_run(runs / "dog", status="failed", reason="NaN", steps=20)
    with served("--output", str(runs)) as (address, _, _), browsing(address, size) as browser:
        browser.open("doctor")
        browser.wait_for("This machine was not checked yet")
        browser.click("Check this machine")
        browser.wait_for("lines are fine", PATIENCE)
        summary = browser.element("//main//summary")
        summary.click()
        browser.wait_for("float32 on cpu")
        assert browser.overflow() <= 0
        browser.open("doctor")
        browser.wait_for("lines are fine")  # the newest result, at once
        browser.field("What to check").find_element("xpath", ".//option[contains(., 'dog')]").click()
        browser.wait_for("dog was not checked yet")
        browser.driver.execute_script(COPIED)
        browser.click("Check this run")
        browser.wait_for("1 problem", PATIENCE)
        browser.wait_for("<b>waited</b>")
        browser.click("Copy")
        command = browser.driver.execute_script("return window.copied[0]")
        assert command.startswith("lora-trainer train --config")
        assert command.endswith("--resume")
        for color in ("light", "dark"):
            browser.show_in(color)
            for page, words in {"doctor": "lines are fine", "doctor/dog": "1 problem"}.items():
                browser.open(page)
                browser.wait_for(words)
                assert browser.overflow() <= 0
                assert browser.barriers() == [], (color, page)
        assert browser.complaints() == []
        assert [each for each in browser.loaded() if not each.startswith(address)] == []
        browser.open("doctor/none")
        browser.wait_for("There is no run none")


def test_gpus_are_shown_as_they_are_now(runs: Path, tmp_path: Path, size: str) -> None:
    stub = tmp_path / "stub"
    stub.mkdir()
    (stub / "pynvml.py").write_text(NVML, encoding="utf-8")
    path = os.pathsep.join([str(stub), os.environ.get("PYTHONPATH", ""), os.getcwd()])
    with served("--output", str(runs), PYTHONPATH=path) as (address, _, _), browsing(address, size) as browser:
        browser.open("doctor")
        for words in ("GPU 0: NVIDIA GeForce RTX 4090", "18 GiB of 24 GiB", "97 %", "91 °C", "250 of 450 W"):
            browser.wait_for(words)
        browser.wait_for("heat limits the GPU to 1400 of 3105 MHz")
        browser.driver.execute_script(COPIED)
        browser.click("Copy for a bug report")
        report = browser.driver.execute_script("return window.copied[0]")
        assert "torch " in report
        assert "GPUs: NVIDIA GeForce RTX 4090, 24 GiB" in report
        assert browser.overflow() <= 0
        assert browser.barriers() == []


def test_more_tabs_than_a_browser_has_connections_all_load(runs: Path) -> None:
    with served("--output", str(runs)) as (address, _, _), browsing(address, "wide") as browser:
        for _ in range(8):
            browser.driver.switch_to.new_window("tab")
            browser.open("doctor")
            browser.wait_for("This machine was not checked yet")
