"""Measure the page of `lora-trainer ui` in Chromium: its first load, scrolling a long list of runs, and memory over time.

    python scripts/measure_page.py --minutes 20
    python scripts/measure_page.py --minutes 20 --page run/live --live 4 --json page.json

It makes a folder of runs (--runs, 1000), serves it and looks at one page without touching it. With --live N a run named
live trains: it writes N steps a second. Needs chromium, its driver and selenium: make test-page installs selenium.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from lora_trainer.run_folder.progress import Progress

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(CHECKOUT)]

from tests.at_work import at_work  # noqa: E402
from tests.page.browser import Browser, browsing  # noqa: E402
from tests.web.site import write_run  # noqa: E402
from tests.web.test_serve import served  # noqa: E402

EVERY_SECONDS = 30.0
SETTLE_SECONDS = 120.0  # after which the heap should be flat
LOADED = """
return performance.getEntries().filter((each) => each.entryType === "navigation" || each.entryType === "resource")
  .map((each) => ({name: new URL(each.name).pathname, bytes: each.encodedBodySize, plain: each.decodedBodySize}));"""
# Scrolls down and up again as a wheel does, and notes when frames came and which tasks took over 50 ms.
SCROLL = """
const done = arguments[arguments.length - 1];
const tasks = [];
new PerformanceObserver((list) => tasks.push(...list.getEntries().map((each) => each.duration))).observe({type: "longtask"});
const frames = [];
let [last, way] = [performance.now(), 1];
const end = () => document.documentElement.scrollHeight - window.innerHeight;
function step(now) {
  frames.push(now - last);
  last = now;
  window.scrollBy(0, way * 400);
  if (way > 0 && window.scrollY >= end() - 1) way = -1;
  if (way < 0 && window.scrollY <= 0) {
    setTimeout(() => done({frames: frames.slice(1), tasks, rows: document.querySelectorAll("[role='row']").length}), 200);
  } else requestAnimationFrame(step);
}
requestAnimationFrame(step);"""


def first_load(browser: Browser) -> dict[str, Any]:
    """What the page fetches until its first look, compressed: its own files, and what the server answers."""
    browser.open()
    browser.wait_for("This computer", 60)
    time.sleep(2)
    rows: list[dict[str, Any]] = browser.driver.execute_script(LOADED)
    answers = [row for row in rows if row["name"].startswith("/api")]
    files = [row for row in rows if row not in answers]
    return {
        "files": len(files),
        "kb": round(sum(row["bytes"] for row in files) / 1000, 1),
        "plain_kb": round(sum(row["plain"] for row in files) / 1000, 1),
        "answers": len(answers),
        "answers_kb": round(sum(row["bytes"] for row in answers) / 1000, 1),
    }


def scrolled(browser: Browser) -> dict[str, Any]:
    """Frames and long tasks while the whole list of runs is scrolled down and up."""
    browser.open("runs")
    browser.wait_for("in all", 60)
    browser.driver.set_script_timeout(600)
    found = browser.driver.execute_async_script(SCROLL)
    frames = sorted(found["frames"])
    return {
        "frames": len(frames),
        "median_ms": round(statistics.median(frames), 1),
        "p99_ms": round(frames[int(0.99 * len(frames))], 1),
        "longest_ms": round(frames[-1], 1),
        "long_tasks": len(found["tasks"]),
        "longest_task_ms": round(max(found["tasks"], default=0.0), 1),
        "rows_in_document": found["rows"],
    }


def idle(browser: Browser, page: str, minutes: float, server: psutil.Process) -> dict[str, Any]:
    """The page's heap after garbage collection, its nodes and listeners, and the server's memory, while nobody acts."""
    browser.open(page)
    browser.driver.execute_cdp_cmd("Performance.enable", {})
    start, rows = time.monotonic(), list[dict[str, float]]()
    while True:
        browser.driver.execute_cdp_cmd("HeapProfiler.collectGarbage", {})
        found = browser.driver.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
        values = {each["name"]: each["value"] for each in found}
        row = {
            "minutes": round((time.monotonic() - start) / 60, 2),
            "heap_mb": round(values["JSHeapUsedSize"] / 1e6, 3),
            "nodes": values["Nodes"],
            "listeners": values["JSEventListeners"],
            "server_mb": round(server.memory_info().rss / 1e6, 1),
        }
        rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
        if time.monotonic() - start >= 60 * minutes:
            break
        time.sleep(EVERY_SECONDS)
    later = [row for row in rows if 60 * row["minutes"] >= SETTLE_SECONDS] or rows
    slope = 0.0
    if len(later) > 1:
        slope = statistics.linear_regression([row["minutes"] for row in later], [row["heap_mb"] for row in later]).slope
    heaps, servers = [row["heap_mb"] for row in later], [row["server_mb"] for row in later]
    return {
        "page": page,
        "heap_mb": [min(heaps), max(heaps)],
        "heap_kb_per_hour": round(60_000 * slope, 1),
        "nodes": [min(row["nodes"] for row in later), max(row["nodes"] for row in later)],
        "server_mb": [min(servers), max(servers)],
        "server_cpu_share": round(sum(server.cpu_times()[:2]) / (time.time() - server.create_time()), 3),
        "samples": rows,
    }


def train(folder: Path, steps_per_second: float, stop: threading.Event) -> None:
    """Be a run that writes so many steps a second."""
    step = 40
    with at_work(folder) as progress_file:
        while not stop.wait(1 / steps_per_second):
            step += 1
            with open(folder / "metrics.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, "loss": 1.0 / step, "lr": 1e-4, "seconds": 1.0}) + "\n")
            progress_file.show(Progress("training", step, 100_000, loss=1.0 / step))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0, help="how long the idle page is watched (20)")
    parser.add_argument("--runs", type=int, default=1000, help="runs in the folder (1000)")
    parser.add_argument("--page", default="runs", help="the page that is watched, such as runs or run/live (runs)")
    parser.add_argument("--live", type=float, metavar="N", help="let a run named live write N steps a second")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the samples there too")
    arguments = parser.parse_args()
    stop = threading.Event()
    with tempfile.TemporaryDirectory(prefix="lora-trainer-page-") as name:
        runs = Path(name) / "runs"
        for number in range(arguments.runs):
            write_run(runs / f"run-{number:04}", started=1e9 + number, outcome="passed", steps=20)
        if arguments.live:
            folder = write_run(runs / "live", status="running", started=2e9, arithmetic={"total": 100_000})
            threading.Thread(target=train, args=(folder, arguments.live, stop)).start()
        try:
            with served("--output", str(runs)) as (address, _, process), browsing(address, "wide") as browser:
                found = {"first_load": first_load(browser), "scroll": scrolled(browser)}
                print(json.dumps(found, indent=2), flush=True)
                found["idle"] = idle(browser, arguments.page, arguments.minutes, psutil.Process(process.pid))
        finally:
            stop.set()
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2), encoding="utf-8")
    print(json.dumps({key: value for key, value in found["idle"].items() if key != "samples"}, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
