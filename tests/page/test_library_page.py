"""The library in a real browser, at two sizes: find and open a LoRA, resize and merge, images with it, hostile names, axe."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest

from lora_trainer.builtin import BASE_FOLDER, DATA_FOLDER
from lora_trainer.core.tensorfile import METADATA, read_tensor_header
from tests.page.browser import PATIENCE, Browser, browsing
from tests.web import tiny_loras
from tests.web.site import write_run
from tests.web.test_serve import served
from tests.web.tiny_loras import SD15, random, write

pytestmark = [
    pytest.mark.slow,  # make test-page; tests/web/test_library.py has what the server answers
    pytest.mark.skipif(os.name == "nt", reason="signals of POSIX"),
]
HOSTILE = '<img src=x onerror="document.title=1">'


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A run, two LoRAs of the built-in base model's layers, another kind, a damaged file and one with a hostile name."""
    runs, library = tmp_path / "runs", tmp_path / "runs" / "library"
    write(write_run(runs / "cat", outcome="passed") / "cat.safetensors", of_the_base(4), **SD15)
    write(library / "style.safetensors", of_the_base(8, seed=3), **SD15, **{"modelspec.trigger_phrase": HOSTILE})
    write(library / "kron.safetensors", tiny_loras.lokr(), **SD15)
    write(library / f"{HOSTILE}.safetensors", ss_base_model_version=HOSTILE, ss_sd_model_name=HOSTILE)
    (library / "broken.safetensors").write_bytes(b"<html>")
    return runs


def of_the_base(rank: int, *, seed: int = 0) -> tiny_loras.Tensors:
    """A LoRA of a few layers of the built-in base model."""
    (weights,) = (BASE_FOLDER / "unet").glob("*.safetensors")
    found: tiny_loras.Tensors = {}
    for name, entry in read_tensor_header(weights).items():
        if name != METADATA and name.endswith("attn2.to_k.weight"):
            layer = f"lora_unet_{name.removesuffix('.weight').replace('.', '_')}"
            rows, columns = entry["shape"]
            found[f"{layer}.lora_down.weight"] = random(rank, columns, seed=seed)
            found[f"{layer}.lora_up.weight"] = random(rows, rank, seed=seed + 1)
    return found


def titles(browser: Browser) -> list[str]:
    script = "return [...document.querySelectorAll('.about-lora .name')].map((each) => each.textContent)"
    found: list[str] = browser.driver.execute_script(script)
    return found


def choose(browser: Browser, label: str, value: str) -> None:
    browser.element(f"//select[@aria-label='{label}']").find_element("xpath", f"option[@value='{value}']").click()


def test_find_a_lora_resize_it_and_delete_the_result(runs: Path, size: str) -> None:
    with served("--output", str(runs)) as (address, _, _), browsing(address, size) as browser:
        browser.open("library")
        browser.wait_for("5 LoRAs")
        assert browser.overflow() <= 0
        assert HOSTILE in titles(browser)
        browser.wait_for("damaged")
        search = browser.element("//input[@aria-label='Search LoRAs']")
        search.send_keys("STYL")
        browser.until(lambda: titles(browser) == ["style"], "only style is shown")
        search.clear()
        search.send_keys("s")
        browser.click("Runs")
        browser.click("Library")
        browser.wait_for("style")
        choose(browser, "Kind", "LoKr")
        browser.wait_for("No LoRA fits")
        browser.click("Show all")
        choose(browser, "Kind", "LoKr")
        browser.until(lambda: titles(browser) == ["kron"], "only the LoKr is shown")
        choose(browser, "Kind", "")
        choose(browser, "Where", "run")
        browser.click("cat")
        browser.wait_for("Verdict of cat")
        browser.wait_for("ComfyUI", 120)
        browser.wait_for("down_blocks")
        assert browser.overflow() <= 0
        link = browser.element("//a[@download and text()='Download']").get_attribute("href")
        assert httpx.get(link).content == (runs / "cat" / "cat.safetensors").read_bytes()
        browser.click("Resize")
        browser.type("Rank", "0")
        browser.type("Name in the library", "style")
        browser.element("//dialog//button[text()='Resize']").click()
        browser.wait_for("rank is 0")
        browser.wait_for("There is a LoRA style.safetensors in the library already")
        assert browser.overflow() <= 0
        browser.type("Rank", "2")
        browser.type("Name in the library", "cat small")
        browser.element("//dialog//button[text()='Resize']").click()
        browser.wait_for("cat small.safetensors is in the library", PATIENCE)
        browser.wait_for("rank 4 -> 2")
        browser.click("Layers with the largest errors")
        assert browser.overflow() <= 0
        browser.click("Open it")
        browser.until(lambda: "cat small.safetensors" in browser.element("//h1").text, "it is open")
        browser.click("Delete")
        browser.element("//dialog//button[text()='Delete']").click()
        browser.wait_for("newest first")
        assert "cat small" not in browser.text
        assert not (runs / "library" / "cat small.safetensors").exists()
        assert [each for each in browser.complaints() if "status of 422" not in each] == []
        assert browser.driver.title == "Library · lora-trainer"


def test_the_style_of_the_library_stays_there(runs: Path, size: str) -> None:
    with served("--output", str(runs)) as (address, _, _), browsing(address, size) as browser:
        browser.open("library")
        browser.wait_for("5 LoRAs")
        place = f"#/datasets/{quote(str(DATA_FOLDER), safe='')}"
        browser.driver.execute_script("location.hash = arguments[0]", place)  # without loading the page anew
        browser.wait_for("24 images", 60)
        if size == "phone":
            browser.click("Search and filters")
        search = browser.element("//input[@aria-label='Search captions and names']")
        assert search.rect["height"] < 60
        browser.driver.execute_script("location.hash = '#/runs'")
        browser.wait_for("cat")
        for field in browser.driver.find_elements("xpath", "//main//input[@type='search'] | //main//select"):
            assert field.rect["height"] < 60


def test_merge_two_and_look_at_images(runs: Path, size: str) -> None:
    with served("--output", str(runs)) as (address, _, _), browsing(address, size) as browser:
        browser.open("library")
        browser.wait_for("5 LoRAs")
        for name in ("cat", "style"):
            box = browser.element(f"//input[@aria-label='Select {name}']")
            browser.driver.execute_script("arguments[0].click()", box)
        browser.wait_for("2 selected")
        browser.click("Merge")
        weight = browser.element("//input[@aria-label='Weight of style.safetensors as a number']")
        weight.clear()
        weight.send_keys("0,5")
        slider = browser.element("//input[@type='range' and @aria-label='Weight of style.safetensors']")
        assert slider.get_attribute("value") == "0.5"
        browser.wait_for("the ranks add up to 12")
        assert browser.overflow() <= 0
        browser.type("Name in the library", "both")
        browser.element("//dialog//button[text()='Merge']").click()
        browser.wait_for("both.safetensors is in the library", PATIENCE)
        browser.until(lambda: "both" in titles(browser), "it is in the list")
        browser.click("Open it")
        browser.wait_for("Sample")
        browser.type("Prompts, one on each line", f"{HOSTILE}\na red circle")
        browser.type("Strengths", "1")
        browser.click("Steps, size, guidance")
        browser.type("Steps", "1")
        browser.click("Generate 4 images")
        browser.until(lambda: len(images(browser)) == 4, "there are four images", PATIENCE)
        browser.until(lambda: all(images(browser)), "they are loaded")
        assert browser.overflow() <= 0
        browser.element("//button[@class='image']").click()
        browser.wait_for("Previous")
        assert browser.element("//dialog//h2").text == "without"
        browser.click("Next")
        browser.until(lambda: browser.element("//dialog//h2").text == "strength 1", "the next image is shown")
        assert browser.overflow() <= 0
        browser.element("//dialog//button[text()='Close']").click()
        # A base model of another family is refused with the words of the command.
        browser.open("library")
        browser.click("kron")
        browser.type("Prompts, one on each line", "x")
        browser.click("Generate 3 images")
        browser.wait_for("sample kron.safetensors: failed", PATIENCE)
        assert browser.complaints() == []
        assert [each for each in browser.loaded() if not each.startswith(address)] == []


def images(browser: Browser) -> list[bool]:
    """Of each image of the sheets, whether it is loaded."""
    script = "return [...document.querySelectorAll('.sheet img')].map((each) => each.naturalWidth > 0)"
    found: list[bool] = browser.driver.execute_script(script)
    return found


def test_a_folder_of_another_program_is_listed(runs: Path, tmp_path: Path, size: str) -> None:
    other = tmp_path / "comfy"
    write(other / "sub" / "elsewhere.safetensors", **SD15)
    arguments = ("--output", str(runs), "--root", str(other))
    with served(*arguments) as (address, _, _), browsing(address, size) as browser:
        browser.open("library")
        browser.click("Folders")
        browser.type("Folder", "/etc")
        browser.click("Add")
        browser.wait_for("outside of the folders")
        browser.type("Folder", str(other))
        browser.click("Add")
        browser.wait_for("1 file")
        assert browser.overflow() <= 0
        browser.click("Close")
        browser.wait_for("elsewhere")
        browser.click("Folders")
        browser.click(f"Remove {other}")
        browser.until(lambda: "1 file" not in browser.text, "it is removed")


def test_the_library_has_no_barrier(runs: Path, size: str) -> None:
    def looked_at(browser: Browser, what: str) -> None:
        assert browser.barriers() == [], what

    with served("--output", str(runs)) as (address, _, _), browsing(address, size) as browser:
        rows = httpx.get(f"{address}/api/loras").json()["loras"]
        style = next(row["id"] for row in rows if row["name"] == "style.safetensors")
        for scheme in ("light", "dark"):
            browser.show_in(scheme)
            browser.open("library")
            browser.wait_for("5 LoRAs")
            for name in ("cat", "style"):
                box = browser.element(f"//input[@aria-label='Select {name}']")
                if not box.is_selected():
                    browser.driver.execute_script("arguments[0].click()", box)
            looked_at(browser, f"{scheme} list")
            browser.click("Merge")
            looked_at(browser, f"{scheme} merge")
            browser.open(f"library/{style}")
            browser.wait_for("down_blocks", 120)
            looked_at(browser, f"{scheme} file")
            browser.click("Convert")
            looked_at(browser, f"{scheme} convert")
