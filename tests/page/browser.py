"""A real Chromium that looks at the page, and a server of a folder of runs."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PATIENCE = 240.0  # seconds; a whole run on a busy machine
SIZES = {"wide": (1280, 900), "phone": (390, 844)}
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")


def skip_without_browser() -> None:
    pytest.importorskip("selenium", reason="needs selenium: make test-page installs it")
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("needs a browser: apt install chromium chromium-driver")


class Browser:
    """What a person does: find by visible words or label, click, type, read."""

    def __init__(self, driver: Any, address: str) -> None:
        self.driver, self.address = driver, address

    def open(self, page: str = "") -> None:
        self.driver.get("about:blank")
        self.driver.get(f"{self.address}/#/{page}")

    @property
    def text(self) -> str:
        found: str = self.driver.execute_script("return document.body.innerText")
        return found

    def wait_for(self, words: str, seconds: float = 30.0) -> None:
        self.until(lambda: words in self.text, f"{words!r} is not on the page", seconds)

    def until(self, found: Any, what: str, seconds: float = 30.0) -> Any:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if value := found():
                return value
            time.sleep(0.1)
        raise AssertionError(f"{what}:\n{self.text}")

    def element(self, xpath: str) -> Any:
        from selenium.common.exceptions import StaleElementReferenceException

        def visible() -> Any:
            try:
                return next((each for each in self.driver.find_elements("xpath", xpath) if each.is_displayed()), None)
            except StaleElementReferenceException:  # the page drew it anew meanwhile
                return None

        return self.until(visible, f"there is no {xpath}")

    def click(self, words: str) -> None:
        """Click the button, link, tab or choice with exactly these words, or with this label."""
        kinds = "self::button or self::a or self::summary or self::label"
        xpath = f"//*[{kinds}][normalize-space(.)='{words}' or @aria-label='{words}']"
        found = self.driver.find_elements("xpath", f"{xpath} | //button[contains(@class, 'menu')]")
        shown = [each for each in found if each.is_displayed()]
        if len(found) > 1 and [each.text for each in shown] == ["Menu"]:  # on a phone it is in there
            shown[0].click()
        element = self.element(xpath)
        self.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
        self.until(element.is_enabled, f"{words} cannot be clicked")
        before: list[Any] = []

        def rests() -> bool:  # what loads above it moves it, also between press and release
            before.append(element.rect)
            return len(before) > 2 and before[-1] == before[-2] == before[-3]

        self.until(rests, f"{words} moves")
        element.click()

    def field(self, label: str) -> Any:
        """The input, select or text area of a label."""
        return self.element(f"//*[@id=//label[normalize-space(.)='{label}']/@for]")

    def type(self, label: str, text: str) -> None:
        field = self.field(label)
        self.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", field)
        field.clear()
        field.send_keys(text)

    def overflow(self) -> int:
        """Pixels that the page is wider than the screen."""
        found: int = self.driver.execute_script("return document.documentElement.scrollWidth - window.innerWidth")
        return found

    def show_in(self, scheme: str) -> None:
        """Show pages in `light` or `dark`."""
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)

    def barriers(self) -> list[tuple[str, str]]:
        """What axe finds on the page: contrast, names, roles, order of headings."""
        axe = pytest.importorskip("axe_core_python", reason="needs axe: make test-page installs it")
        self.driver.execute_script((Path(axe.__path__[0]) / "axe.min.js").read_text(encoding="utf-8"))
        found = self.driver.execute_async_script("axe.run().then(arguments[0])")["violations"]
        return [(each["id"], each["nodes"][0]["html"]) for each in found]

    def loaded(self) -> list[str]:
        """Addresses of everything that the page has fetched."""
        entries = "performance.getEntriesByType('resource').map((each) => each.name)"
        found: list[str] = self.driver.execute_script(f"return {entries}")
        return found

    def complaints(self) -> list[str]:
        """Errors and warnings of the browser's console, such as a breach of the content security policy."""
        return [each["message"] for each in self.driver.get_log("browser") if each["level"] in ("SEVERE", "WARNING")]


@contextmanager
def browsing(address: str, size: str, *, language: str = "en-US") -> Iterator[Browser]:
    """A browser of this size, which reaches nothing but this machine."""
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    width, height = SIZES[size]
    options = ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for argument in (
        *("--headless=new", "--no-sandbox", "--disable-gpu", f"--lang={language}", f"--window-size={width},{height}"),
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    ):
        options.add_argument(argument)
    options.add_experimental_option("prefs", {"intl.accept_languages": language})
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options=options, service=Service(str(DRIVER)))
    try:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == "phone"}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        yield Browser(driver, address)
    finally:
        driver.quit()
