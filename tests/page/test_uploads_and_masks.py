"""Files dropped into datasets and masks drawn on images, in a real browser: what lies on the disk then."""

from __future__ import annotations

import base64
import io
import json
import os
import socket
import time
import urllib.error
import urllib.request
import zipfile
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest
from PIL import Image

from tests.page.browser import PATIENCE, Browser
from tests.page.test_datasets_page import open_dataset, open_image, page_of

pytestmark = [
    pytest.mark.slow,  # make test-page; tests/web/test_uploads.py has what the server answers
    pytest.mark.skipif(os.name == "nt", reason="signals of POSIX"),
]
DROP = """
const transfer = new DataTransfer();
for (const [name, data] of arguments[0]) {
  transfer.items.add(new File([Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0))], name));
}
for (const kind of ["dragenter", "dragover"].concat(arguments[1] ? ["drop"] : [])) {
  document.body.dispatchEvent(new DragEvent(kind, { dataTransfer: transfer, bubbles: true, cancelable: true }));
}
"""


def image(kind: str = "PNG", across: int = 600, down: int = 400) -> bytes:
    file, gray = io.BytesIO(), Image.linear_gradient("L").resize((across, down))
    Image.merge("RGB", (gray, gray.transpose(Image.Transpose.ROTATE_180), gray)).save(file, kind)
    return file.getvalue()


def write_dataset(tmp_path: Path, **images: bytes) -> Path:
    own = tmp_path / "datasets" / "own"
    own.mkdir(parents=True)
    for name, data in images.items():
        (own / f"{name}.png").write_bytes(data)
        (own / f"{name}.txt").write_text("a photo\n", encoding="utf-8")
    return own


def drop(browser: Browser, files: dict[str, bytes], *, is_dropped: bool = True) -> None:
    sent = [(name, base64.b64encode(data).decode()) for name, data in files.items()]
    browser.driver.execute_script(DROP, sent, is_dropped)


def refuse_barriers(browser: Browser) -> None:
    """By axe, in light and dark."""
    for scheme in ("light", "dark"):
        browser.show_in(scheme)
        assert browser.barriers() == [], scheme


def test_three_files_are_dropped_and_one_is_broken(tmp_path: Path, size: str) -> None:
    own = write_dataset(tmp_path, first=image())
    files = {"cat.png": image(), "cat.txt": b"a cat\n", "broken.png": image()[:300]}
    with page_of(tmp_path, size) as browser:
        open_dataset(browser, own, "first.png")
        drop(browser, files, is_dropped=False)
        browser.wait_for("Drop images and captions")
        drop(browser, files)
        browser.wait_for("2 of 3 files added, 1 not")
        browser.wait_for("broken.png cannot be read")
        assert "Drop images and captions" not in browser.text
        assert browser.overflow() <= 0
        assert sorted(os.listdir(own)) == ["cat.png", "cat.txt", "first.png", "first.txt"]
        assert (own / "cat.png").read_bytes() == files["cat.png"]
        browser.wait_for("2 images", 60)
        refuse_barriers(browser)
        browser.click("Try broken.png again")
        browser.wait_for("2 of 3 files added, 1 not")
        browser.click("Remove broken.png")
        browser.wait_for("2 of 2 files added")
        drop(browser, {"first.png": image(across=500), "<b>x</b>.png": image(), "notes.pdf": b"x"})
        browser.click("Add first.png as first-2.png")
        browser.until((own / "first-2.png").is_file, "both are kept")
        browser.wait_for("is not a name that every system can have")
        browser.wait_for("Neither an image nor a caption")
        assert browser.driver.execute_script("return document.querySelectorAll('.uploads b').length") == 1
        assert (own / "first.png").read_bytes() == image()


def test_a_new_dataset_of_chosen_files_and_an_archive(tmp_path: Path, size: str) -> None:
    archive, photos = io.BytesIO(), tmp_path / "photos"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("all/10_sks cat/dog.png", image())
        file.writestr("all/10_sks cat/dog.txt", "a dog")
        file.writestr("__MACOSX/._dog.png", b"x")
        file.writestr("../../../escape.png", image())
    photos.mkdir()
    (photos / "photo.jpg").write_bytes(image("JPEG"))
    (photos / "wrong.jpg").write_bytes(image("WEBP"))
    made = tmp_path / "datasets" / "my cat"
    with page_of(tmp_path, size) as browser:
        browser.open("datasets")
        browser.wait_for("None yet")
        drop(browser, {"more.zip": archive.getvalue()})
        browser.wait_for("Of 1 files")
        refuse_barriers(browser)
        browser.type("Name", "..")
        browser.click("Make it")
        browser.wait_for("pattern")
        browser.type("Name", "my cat")
        browser.click("Make it")
        browser.wait_for("2 files in it", 60)
        browser.wait_for("3 of 3 files added")  # with the archive; what leads out of it is left out
        browser.element("//button[@class='tile-open'][starts-with(@aria-label, '10_sks cat/dog.png')]")
        chooser = browser.driver.find_element("css selector", "input.chooser")
        chooser.send_keys("\n".join(map(str, sorted(photos.iterdir()))))
        browser.wait_for("named wrong.webp")
        browser.wait_for("5 of 5 files added")
        found = {path.relative_to(made).as_posix() for path in made.rglob("*.*")}
        assert found == {"10_sks cat/dog.png", "10_sks cat/dog.txt", "photo.jpg", "wrong.webp"}
        assert not list(tmp_path.rglob("escape*"))
        assert browser.overflow() <= 0


def places(browser: Browser, *points: tuple[float, float]) -> list[tuple[int, int]]:
    """Points of the screen for shares of the image."""
    box = browser.driver.execute_script("return document.querySelector('dialog.mask canvas').getBoundingClientRect()")
    return [(round(box["x"] + x * box["width"]), round(box["y"] + y * box["height"])) for x, y in points]


def draw(browser: Browser, *points: tuple[float, float], is_touch: bool = False) -> None:
    """A stroke between points, as shares of the image."""
    from selenium.webdriver.common.action_chains import ActionBuilder

    first, *others = places(browser, *points)
    if is_touch:
        touch(browser, [first], *[[place] for place in others])
        return
    actions = ActionBuilder(browser.driver, duration=40)
    actions.pointer_action.move_to_location(*first)
    actions.pointer_action.pointer_down()
    for place in others:
        actions.pointer_action.move_to_location(*place)
    actions.pointer_action.pointer_up()
    actions.perform()


def touch(browser: Browser, *moments: list[tuple[int, int]]) -> None:
    """Fingers that come and move, and leave in the end."""
    before = 0
    for fingers in [*moments, []]:
        kind = "touchStart" if len(fingers) > before else "touchMove" if fingers else "touchEnd"
        sent = [{"x": x, "y": y, "id": number} for number, (x, y) in enumerate(fingers)]
        browser.driver.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": kind, "touchPoints": sent})
        before = len(fingers)


def test_two_fingers_zoom_and_draw_nothing(tmp_path: Path) -> None:
    own = write_dataset(tmp_path, photo=image())
    with page_of(tmp_path, "phone") as browser:
        open_dataset(browser, own, "photo.png")
        open_image(browser, "photo.png")
        browser.click("Draw a mask")
        browser.wait_for("Nothing is painted yet")
        across = "return document.querySelector('dialog.mask canvas').getBoundingClientRect().width"
        before = browser.driver.execute_script(across)
        one, other, far, farther = places(browser, (0.45, 0.5), (0.55, 0.5), (0.3, 0.5), (0.7, 0.5))
        touch(browser, [one], [one, other], [far, other], [far, farther])
        browser.until(lambda: browser.driver.execute_script(across) > 1.5 * before, "it is larger")
        assert "Nothing is painted yet" in browser.text
        browser.click("Fit")
        browser.until(lambda: browser.driver.execute_script(across) == before, "it fits again")
        draw(browser, (0.4, 0.4), (0.6, 0.6), is_touch=True)
        browser.wait_for("% of the image counts")


def test_a_mask_is_drawn_and_changed(tmp_path: Path, size: str) -> None:
    from selenium.webdriver import ActionChains, Keys

    own = write_dataset(tmp_path, photo=image(across=901, down=600))
    saved = own / "photo-masklabel.png"
    with page_of(tmp_path, size) as browser:
        open_dataset(browser, own, "photo.png")
        open_image(browser, "photo.png")
        browser.click("Draw a mask")
        browser.wait_for("Nothing is painted yet")
        assert browser.overflow() <= 0
        draw(browser, (0.25, 0.5), (0.75, 0.5), is_touch=size == "phone")
        draw(browser, (0.5, 0.1), (0.6, 0.1))
        browser.wait_for("% of the image counts")
        ActionChains(browser.driver).key_down(Keys.CONTROL).send_keys("z").key_up(Keys.CONTROL).send_keys("e").perform()
        draw(browser, (0.5, 0.3), (0.5, 0.5), (0.5, 0.7))
        refuse_barriers(browser)
        browser.click("Save")
        browser.until(saved.is_file, "it is saved")
        with Image.open(saved) as mask:
            assert (mask.mode, mask.size, mask.format) == ("L", (901, 600), "PNG")
            at = {x: mask.getpixel((round(x * 901), 300)) for x in (0.1, 0.3, 0.5, 0.7, 0.9)}
            assert at == {0.1: 0, 0.3: 255, 0.5: 0, 0.7: 255, 0.9: 0}
            assert mask.getpixel((495, 60)) == 0  # taken back
        browser.click("Change the mask")
        browser.wait_for("% of the image counts")
        browser.click("Invert")
        browser.click("Cancel")
        browser.wait_for("Close without saving?")
        browser.click("Draw on")
        browser.click("Save")
        browser.until(lambda: Image.open(saved).getpixel((90, 300)) == 255, "it is turned over")
        with Image.open(saved) as mask:
            assert [mask.getpixel((round(x * 901), 300)) for x in (0.3, 0.5)] == [0, 255]
        browser.open(f"new/{quote(str(own), safe='')}")
        browser.wait_for("Use the mask of 1 image", 60)
        browser.wait_for("own (masks)", 20)
        assert browser.overflow() <= 0
        (own / "plain.png").write_bytes(image(across=902, down=600))
        browser.driver.refresh()
        browser.wait_for("1 of 2 images has a mask. The other one would be trained in full", 60)
        assert not browser.element("//label[contains(., 'Use the mask of 1 image')]/input").is_selected()
        open_dataset(browser, own, "photo.png")
        open_image(browser, "photo.png")
        browser.click("Change the mask")
        browser.click("Remove the mask")
        browser.until(lambda: not saved.exists(), "it is removed")
        browser.wait_for("Draw a mask")
        assert browser.complaints() == []


def test_a_mask_of_a_large_image_by_keys(tmp_path: Path) -> None:
    """It is drawn at 2048 pixels, and saved at the size of the image; the page's canvas may be smaller on a phone."""
    from selenium.webdriver import ActionChains, Keys

    own = write_dataset(tmp_path, photo=image(across=3000, down=2001))
    with page_of(tmp_path) as browser:
        open_dataset(browser, own, "photo.png")
        open_image(browser, "photo.png")
        browser.click("Draw a mask")
        browser.wait_for("Nothing is painted yet")
        canvas = browser.driver.find_element("css selector", "dialog.mask canvas")
        browser.driver.execute_script("arguments[0].focus()", canvas)
        ActionChains(browser.driver).send_keys(
            "[[[", Keys.SPACE, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.SPACE, "++"
        ).perform()
        browser.wait_for("% of the image counts")
        browser.click("Save")
        saved = own / "photo-masklabel.png"
        browser.until(saved.is_file, "it is saved")
        with Image.open(saved) as mask:
            assert (mask.mode, mask.size) == ("L", (3000, 2001))
            assert [mask.getpixel(at) for at in ((1500, 1000), (100, 100), (1500, 1500))] == [255, 0, 0]


def test_train_on_this_uses_the_masks(tmp_path: Path) -> None:
    """From the dataset's page to a run of some steps whose settings name the masks."""
    own = write_dataset(tmp_path, **{f"photo{number}": image(across=500 + number, down=500) for number in range(4)})
    for number in range(4):
        mask = Image.new("L", (500 + number, 500))
        mask.paste(255, (0, 0, 250, 500))
        mask.save(own / f"photo{number}-masklabel.png")
    with page_of(tmp_path) as browser:
        open_dataset(browser, own, "photo0.png")
        browser.click("Train on this")
        browser.wait_for("Use the masks of 4 images", 60)
        for name, value in {"train.max_steps": "4", "gates.lora_check": "off"}.items():
            browser.type("Search all settings", name)
            field = browser.field(name)
            if field.tag_name == "select":
                field.find_element("xpath", f"option[@value='{value}']").click()
            else:
                browser.type(name, value)
        browser.click("Refuse a dataset or a LoRA that scores below the minimum")
        browser.click("Start run")
        record = tmp_path / "runs" / "own" / "run.json"  # named after the dataset

        def found() -> Any:
            return record.is_file() and json.loads(record.read_text("utf-8"))

        browser.until(lambda: found() and found()["status"] == "done", "it is done", PATIENCE)
        sources = found()["config"]["data"]["sources"]
        assert [(each["path"], each["masks"]) for each in sources] == [(str(own), str(own))]
        assert found()["steps"] == 4


def test_lost_connections_leave_nothing_but_what_can_be_sent_again(tmp_path: Path) -> None:
    own = write_dataset(tmp_path, first=image())
    with page_of(tmp_path) as browser:
        open_dataset(browser, own, "first.png")
        asked = urlencode({"path": str(own), "name": "by-script.png"}, quote_via=quote)
        headers = {"Content-Type": "image/png"}
        request = urllib.request.Request(f"{browser.address}/api/datasets/file?{asked}", image(), headers, method="PUT")
        with urllib.request.urlopen(request) as answer:
            assert json.load(answer)["is_new"] is True
        host, port = browser.address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:  # one that ends in the middle of an image
            head = f"PUT /api/datasets/file?{asked.replace('by-script', 'half')} HTTP/1.1\r\nHost: {host}:{port}\r\n"
            connection.sendall(f"{head}Content-Type: image/png\r\nContent-Length: 4000000\r\n\r\n".encode() + image())
            browser.until(lambda: list(own.glob(".*.part")), "it is being received")
        browser.until(lambda: not list(own.glob(".*")), "nothing of it is left")
        assert not (own / "half.png").exists()
        for name, body in (("large.png", bytes(70_000_000)), ("in/../x.png", image())):
            asked = urlencode({"path": str(own), "name": name}, quote_via=quote)
            large = urllib.request.Request(f"{browser.address}/api/datasets/file?{asked}", body, headers, method="PUT")
            with pytest.raises(urllib.error.URLError):
                urllib.request.urlopen(large)
        assert sorted(path.name for path in own.iterdir()) == ["by-script.png", "first.png", "first.txt"]
        browser.driver.execute_cdp_cmd("Network.enable", {})
        offline = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
        browser.driver.execute_cdp_cmd("Network.emulateNetworkConditions", offline)
        drop(browser, {f"cat{number}.png": image(across=300 + number) for number in range(6)})
        browser.wait_for("0 of 6 files added, 6 not")
        browser.driver.execute_cdp_cmd(
            "Network.emulateNetworkConditions",
            {"offline": False, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1},
        )
        time.sleep(0.2)
        browser.click("Try all again")
        browser.wait_for("6 of 6 files added")
        assert len(list(own.glob("cat*.png"))) == 6
