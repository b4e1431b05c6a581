"""`report.html` of the real command for every ending of a run."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shlex
import shutil
import signal
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lora_trainer.cli.main import main
from lora_trainer.core.io import read_json
from lora_trainer.diffusion import loss as loss_module
from lora_trainer.evaluation.part_words import WORDS
from lora_trainer.monitor.trackers import Trackers
from lora_trainer.run_folder.record import Record
from tests.recipes.recipe import Bench, draw_images, patched, record
from tests.recipes.test_bad_input import nan_at
from tests.recipes.test_resume import at_step

VOID = {"meta", "img", "input", "br", "link", "hr"}
HOSTILE = '<script>alert("x")</script> & <img src=x onerror=alert(1)> {{ 7 * 7 }} a ring'


class Page(HTMLParser):
    """A parsed page: its text and every element with its attributes. Unclosed elements are an error."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert self._open == []
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] not in ("script", "style"):
            self.words.append(data)

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def charts(self) -> set[str]:
        return {str(each["id"]).removeprefix("chart-") for each in self.of("figure") if each.get("id")}


def page_of(folder: Path) -> Page:
    page = Page(folder / "report.html")
    for tag, attributes in page.elements:
        for name in ("src", "href", "action", "data", "poster", "srcset"):
            assert (attributes.get(name) or "data:").startswith("data:"), (tag, attributes)
        assert not [name for name in attributes if name.startswith("on")], (tag, attributes)
    assert len(page.of("script")) == 1
    policy = next(each["content"] for each in page.of("meta") if "http-equiv" in each)
    assert policy is not None
    assert policy.startswith("default-src 'none'; img-src data:;")
    script = re.findall("<script>(.*?)</script>", (folder / "report.html").read_text("utf-8"), flags=re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script[0].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy, "the page's own script, and no other, may run"
    assert (folder / "report.html").stat().st_size < 3_000_000
    return page


def test_a_finished_run_has_a_report(finished: Bench) -> None:
    folder = finished.folder("first")
    page, document = page_of(folder), record(folder)
    assert document["files"]["report"] == "report.html"
    assert document["files"]["before_after"] == "samples/before_after.png"
    assert document["samples"] == ["samples/before_after.json"]
    assert document["memory"]["peak_gib"] > 0
    assert f"{document['scores']['dataset']:.2f}" in page.text
    for name, part in document["lora"]["parts"].items():
        counts = f"{part['count']} of {part['of']}" if "of" in part else ""
        measured = counts if part["measured"] else "– not measured"
        assert f"{WORDS[name].title} {WORDS[name].question} {measured}" in page.text
    assert page.charts == {"loss", "loss-log", "val-loss", "gain", "lr", "norm", "speed", "memory"}
    kept = [row[what] for row in document["lora"]["images"] for what in ("lora", "base", "nearest") if what in row]
    assert len(page.of("img")) == 2 + len(kept)
    assert all((folder / file).is_file() for file in kept)
    settings = page.text[page.text.index("Settings") :]  # findings name settings too
    for name, origin in document["origins"].items():
        section, key = name.split(".")
        row = settings[settings.index(f"{name} ") :]
        assert origin in row[: 400 + len(str(document["config"][section][key]))], name
    assert "sdpa (set: auto)" in settings, "the value in use, next to the one that was set"
    assert document["versions"]["torch"] in page.text
    assert all(choice in page.text for choice in document["choices"])


def test_the_verdict_is_in_tensorboard(finished: Bench) -> None:
    folder = finished.folder("first")
    lora = record(folder)["lora"]
    board = EventAccumulator(str(folder / "logs"))
    board.Reload()
    shown = {tag: board.Scalars(tag)[-1].value for tag in board.Tags()["scalars"] if tag.startswith("verdict/")}
    expected = {"verdict/score": lora["score"]}
    for name, part in lora["parts"].items():
        for end, key in (("", "value"), ("_low", "low"), ("_high", "high")):
            expected |= {f"verdict/{name}{end}": part[key]} if part["measured"] else {}
    assert shown == pytest.approx(expected, abs=1e-4)
    (text,) = board.Tensors("verdict/text_summary")[-1].tensor_proto.string_val
    assert f"**{lora['outcome']}**, score {lora['score']:.2f}" in text.decode()
    assert f"| {WORDS['works'].title} |" in text.decode()


def test_gain_and_agreement_are_drawn_with_their_intervals(finished: Bench, tmp_path: Path) -> None:
    folder = tmp_path / "first"
    shutil.copytree(finished.folder("first"), folder)
    agreement = {"agreement": 0.75, "agreement_low": 0.3, "agreement_high": 0.95}
    bands = {f"gain_at_{band}_noise": 0.25 for band in ("low", "mid", "high")}
    gain = {"gain": 0.5, "gain_low": 0.25, "gain_high": 0.625, **bands}
    rows = [{"step": 0, "loss": 0.8, **agreement}, {"step": 3, "loss": 0.4, **agreement, **gain}]
    rows.append({"step": 6, "loss": 0.4, **agreement, **gain})
    (folder / "validation.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert main(["report", str(folder)]) == 0
    page = page_of(folder)
    assert {"gain", "agreement"} < page.charts
    assert "agreement: from 0.75 at step 0 to 0.75 at step 6" in page.text
    assert "from: from 25 at step 3" in page.text
    assert "Chance is 0.5." in page.text


def test_hardware_measurements_are_saved_and_shown(finished: Bench) -> None:
    found = record(finished.folder("first"))
    assert 0.0 < found["seen"]["system_memory"] <= 1.0
    assert found["memory"]["peak_gib"] > 0.0
    assert "The machine" in page_of(finished.folder("first")).text


def test_the_page_is_the_same_in_a_moved_folder(finished: Bench, tmp_path: Path, capsys) -> None:
    moved = tmp_path / "elsewhere" / "first"
    shutil.copytree(finished.folder("first"), moved)
    before = (moved / "report.html").read_bytes()
    (moved / "report.html").unlink()
    assert main(["report", str(moved)]) == 0
    assert capsys.readouterr().out.strip() == str(moved / "report.html")
    assert (moved / "report.html").read_bytes() == before


def test_missing_files_are_named(finished: Bench, tmp_path: Path) -> None:
    bare = tmp_path / "first"
    bare.mkdir()
    document = record(finished.folder("first"))
    del document["dataset"]["findings"]
    (bare / "run.json").write_text(json.dumps(document), encoding="utf-8")
    assert main(["report", str(bare)]) == 0
    page = page_of(bare)
    assert "No sample images" in page.text
    assert "No step was finished" in page.text
    assert "did not record them" in page.text
    assert page.charts == set()


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"config": 3, "scores": [], "lora": "x", "steps": null}', "{"])
def test_a_damaged_record_is_refused_and_leaves_the_pages(content: str, tmp_path: Path, capsys) -> None:
    runs = [tmp_path / name for name in ("whole", "damaged")]
    for run in runs:
        run.mkdir()
        (run / "report.html").write_text("as it was", encoding="utf-8")
        (run / "run.json").write_text('{"config": {"lora": {"rank": 4}}}', encoding="utf-8")
    (tmp_path / "damaged" / "run.json").write_text(content, encoding="utf-8")
    assert main(["report", str(runs[1])]) == 2
    assert main(["report", *map(str, runs)]) == 2
    assert main(["report", str(tmp_path)]) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert not (tmp_path / "comparison.html").exists()
    assert [(run / "report.html").read_text("utf-8") for run in runs] == ["as it was"] * 2
    assert main(["report", str(runs[0])]) == 0


@pytest.mark.parametrize(
    "odd", [{"scores": [], "lora": "x"}, {"dataset": 3, "steps": None}, {"config": {"train": 3}, "files": []}]
)
def test_a_record_with_odd_parts_still_gives_a_report(odd: dict[str, Any], finished: Bench, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps(record(finished.folder("first")) | odd), encoding="utf-8")
    assert main(["report", str(tmp_path)]) == 0


def test_the_exported_step_is_marked_next_to_the_best(finished: Bench, tmp_path: Path) -> None:
    folder = tmp_path / "first"
    shutil.copytree(finished.folder("first"), folder)
    released = {"step": 3, "val_loss": 0.4, "reason": "validation loss was lowest at step 3: 0.4000"}
    (folder / "run.json").write_text(json.dumps(record(folder) | {"released": released}), encoding="utf-8")
    losses = [{"step": 0, "loss": 0.9}, {"step": 3, "loss": 0.4}, {"step": 6, "loss": 0.5}]
    (folder / "validation.jsonl").write_text("\n".join(map(json.dumps, losses)), encoding="utf-8")
    assert main(["report", str(folder)]) == 0
    page = page_of(folder)
    assert "From which step? 3 of 6 Validation loss was lowest" in page.text
    assert "best, and the LoRA: step 3" in page.text
    assert "0.9 → 0.4 before training → best, at step 3" in page.text
    worse = [{"step": 0, "loss": 0.2}, {"step": 3, "loss": 0.4}]
    (folder / "validation.jsonl").write_text("\n".join(map(json.dumps, worse)), encoding="utf-8")
    assert main(["report", str(folder)]) == 0
    page = page_of(folder)
    assert "it never got lower" in page.text
    assert "best: step 0 the LoRA: step 3" in page.text


def test_nonfinite_numbers_leave_gaps(finished: Bench, tmp_path: Path) -> None:
    folder = tmp_path / "first"
    shutil.copytree(finished.folder("first"), folder)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    rows[2] |= {"loss": float("nan"), "grad_norm": float("inf"), "samples_per_second": None}
    lines = [*map(json.dumps, rows), '{"step": 7, "lo']
    (folder / "metrics.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert main(["report", str(folder)]) == 0
    page = page_of(folder)
    assert "loss" in page.charts
    for line in page.of("path"):
        assert not re.search("nan|inf", str(line["d"]))
    for plot in page.of("div"):
        if points := plot.get("data-lines"):
            json.loads(points, parse_constant=pytest.fail)


def test_hostile_captions_and_names_are_text(bench: Bench, tmp_path: Path) -> None:
    data = draw_images(tmp_path / "hostile")
    for caption in data.glob("*.txt"):
        caption.write_text(f"{HOSTILE} {caption.stem}", encoding="utf-8")
    named = data / "<b>bold&.png"
    shutil.copy(data / "image_0.png", named)
    named.with_suffix(".txt").write_text(HOSTILE, encoding="utf-8")
    hostile = Bench(bench.model, data, bench.output, bench.cache)
    assert hostile.run("hostile", sample__every_n_steps=2, steps=4, gates__lora_check="lite") == 0
    page = page_of(bench.folder("hostile"))
    assert HOSTILE in page.text
    assert "<b>bold&.png" in page.text
    assert "Each prompt through the steps" in page.text
    assert {each.get("name") for each in page.of("input")} == {"scale"}


def test_a_failed_run_shows_where_it_failed_and_what_is_saved(bench: Bench) -> None:
    with patched(loss_module, "squared_error", nan_at(4)):
        assert (
            bench.run(
                "nan", safeguards__on_nonfinite="stop", train__effective_batch_size=1, checkpoint__every_n_steps=2
            )
            == 5
        )
    folder = bench.folder("nan")
    page, document = page_of(folder), record(folder)
    assert "Not yet: the training failed after step 3 of 6" in page.text
    assert "at step 4; not finite is the loss of image_" in page.text
    assert "checkpoints/step-000003 is safe" in page.text
    assert "--resume" in page.text
    assert document["hardware"]["device"] == "cpu"
    assert document["choices"]
    assert document["scores"]["lora"] is None
    assert "No sample images" in page.text
    assert bench.run("nan", "--resume", train__effective_batch_size=1, checkpoint__every_n_steps=2) == 0
    page = page_of(folder)
    assert "the training failed" not in page.text
    assert "2 sessions" in page.text
    assert record(folder)["sessions"] == 2


def test_the_command_shown_for_a_stopped_run_resumes_it(bench: Bench) -> None:
    with patched(Trackers, "steps", at_step(3, lambda: signal.raise_signal(signal.SIGTERM))):
        assert bench.run("halted", sample__every_n_steps=2, gates__lora_check="lite") == 143
    page = page_of(bench.folder("halted"))
    assert "Not yet: stopped at step 4 of 6" in page.text
    assert "checkpoints/step-000004 is safe" in page.text
    assert "While training, at step 4" in page.text
    command = re.search("lora-trainer (train .* --resume)", page.text)
    assert command is not None
    assert main(shlex.split(command[1])) == 0
    assert record(bench.folder("halted"))["status"] == "done"
    page = page_of(bench.folder("halted"))
    assert "--resume" not in page.text
    assert page.text.count("step 6, exported") == 1


def test_a_run_that_was_killed_does_not_claim_an_end(finished: Bench, tmp_path: Path) -> None:
    folder = tmp_path / "first"
    shutil.copytree(finished.folder("first"), folder)
    (folder / "run.json").write_text(json.dumps(record(folder) | {"status": "running"}), encoding="utf-8")
    assert main(["report", str(folder)]) == 0
    page = page_of(folder)
    assert "killed before it could record" in page.text
    assert "checkpoints/step-000006 is safe" in page.text


def test_a_refused_lora_is_shown_as_refused(bench: Bench) -> None:
    assert bench.run("poor", command="produce", optimizer__learning_rate="1e-12", gates__lora_check="lite") == 4
    page = page_of(bench.folder("poor"))
    assert "No, do not use it" in page.text
    assert "changes nothing" in page.text
    assert "not measured the LoRA does not work" in page.text
    assert "From which step? 6 of 6" in page.text


def test_a_report_that_cannot_be_written_ends_nothing(bench: Bench, capsys) -> None:
    bench.folder("blocked").mkdir(parents=True)
    from lora_trainer import report

    def full(folder: Path) -> Path:
        raise OSError(28, "No space left on device")

    with patched(report, "write_report", full):
        bench.folder("blocked").rmdir()
        assert bench.run("blocked", steps=2) == 0
    assert "report.html could not be written" in capsys.readouterr().out
    assert record(bench.folder("blocked"))["files"]["report"] is None


def test_runs_are_compared(finished: Bench, tmp_path: Path, capsys) -> None:
    other = tmp_path / "second"
    shutil.copytree(finished.folder("first"), other)
    document = record(other)
    document |= {
        "name": "<i>second",
        "config": document["config"] | {"lora": document["config"]["lora"] | {"rank": 77}},
    }
    (other / "run.json").write_text(json.dumps(document), encoding="utf-8")
    page = tmp_path / "both" / "report.html"
    assert main(["report", str(finished.folder("first")), str(other), "--output", str(page)]) == 0
    seen = page_of(page.parent)
    assert "lora.rank 4 77" in seen.text
    assert "<i>second" in seen.text
    assert seen.charts == {"val-loss", "loss"}
    assert "optimizer.learning_rate" not in seen.text


def test_folders_without_a_run_are_all_named(tmp_path: Path, capsys) -> None:
    assert main(["report", str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    output = capsys.readouterr().err
    assert str(tmp_path / "a") in output
    assert str(tmp_path / "b") in output


def test_the_record_of_a_run_is_read_as_it_was_written(finished: Bench) -> None:
    folder = finished.folder("first")
    record = Record.read(folder)
    assert record is not None
    assert record.is_finished
    assert (record.planned_steps, record.steps) == (6, 6)
    assert record.setting("train.max_steps") == 6
    assert json.loads(json.dumps(asdict(record))) == read_json(folder / "run.json")
