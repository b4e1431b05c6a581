"""Requests to a run that trains: `lora-trainer request RUN save|sample|prompts`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from lora_trainer.cli.main import main
from lora_trainer.config.toml import parse_value
from lora_trainer.core.errors import UsageError
from lora_trainer.run.requesting import send_request
from lora_trainer.run.trainer import ProductionTrainer
from lora_trainer.run_folder.progress import Progress
from tests.at_work import at_work
from tests.recipes.recipe import QUICK, Bench, exported, record, rows
from tests.recipes.test_processes import WITHOUT_GPUS, launch

STEPS = 6
PROMPTS = ("a ring at sea", "a ring in the snow")


def trained(
    bench: Bench, at: dict[int, Callable[[Path], None]] | None = None, *, resume: bool = False, check: str = "off"
) -> Path:
    """The folder of a run that calls these functions while it trains, by step."""

    def progress(now: Progress) -> None:
        if now.phase == "training" and at is not None:
            at.pop(now.step, lambda folder: None)(bench.folder("cat"))

    steps = {
        "train.max_steps": STEPS,
        "checkpoint.every_n_steps": 500,
        "checkpoint.keep_last": 9,
        "gates.lora_check": check,
    }
    settings = {name: parse_value(value) for name, value in QUICK.items()} | steps | {"cache.dir": str(bench.cache)}
    trainer = ProductionTrainer(
        bench.model, bench.data, settings=settings, output=bench.output, name="cat", progress=progress, quiet=True
    )
    assert trainer.train(resume=resume).exit_code == 0
    return bench.folder("cat")


def request(*arguments: str) -> Callable[[Path], None]:
    def send(folder: Path) -> None:
        assert main(["request", str(folder), *arguments]) == 0

    return send


def answer(folder: Path, number: int) -> dict[str, object]:
    document: dict[str, object] = json.loads((folder / "requests" / "done" / f"{number}.json").read_text("utf-8"))
    return document


def test_requests_are_done_and_change_nothing_that_is_trained(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = exported(trained(Bench(bench.model, bench.data, tmp_path / "plain", bench.cache)))

    def damaged(folder: Path) -> None:
        (folder / "requests" / "7.json").write_text('{"do": "sa', encoding="utf-8")
        (folder / "requests" / "8.json").write_text('{"do": "stop"}', encoding="utf-8")

    def changed(folder: Path) -> None:
        request("prompts", *(part for prompt in PROMPTS for part in ("--prompt", prompt)))(folder)
        request("sample")(folder)

    folder = trained(bench, {1: request("save"), 2: damaged, 3: changed, STEPS: request("save")}, check="lite")
    assert exported(folder) == plain
    assert [line.rpartition("/")[2] for line in capsys.readouterr().out.split()] == [
        "1.json",
        "9.json",
        "10.json",
        "11.json",
    ]

    lora = "weights/cat-step-000002.safetensors"
    assert answer(folder, 1) == {"do": "save", "step": 2, "result": f"saved checkpoints/step-000002 and {lora}"}
    assert (folder / "checkpoints" / "step-000002" / "state.json").is_file()
    assert record(folder)["weights"] == [lora]
    assert str(answer(folder, 7)["problem"]).startswith("The file is no JSON document")
    assert answer(folder, 8)["problem"] == "There is no request 'stop'. Known: prompts, sample, save."
    now = "2 prompts for sample images from now on"
    assert answer(folder, 9) == {"do": "prompts", "step": 4, "prompts": list(PROMPTS), "result": now}
    assert answer(folder, 10) == {"do": "sample", "step": 4, "result": "generated samples/step-000004.png"}
    drawn = json.loads((folder / "samples" / "step-000004.json").read_text("utf-8"))
    assert [row["prompt"] for row in drawn["images"]] == list(PROMPTS)
    last = json.loads((folder / "samples" / "before_after.json").read_text("utf-8"))
    assert [row["prompt"] for row in last["images"]] == list(PROMPTS)[:1]  # a lite check draws one
    assert answer(folder, 11)["problem"] == "The training ended before this was done."
    assert [path.name for path in (folder / "requests").iterdir()] == ["done"]
    events = [(row["step"], row["message"].partition(":")[0]) for row in rows(folder, "events.jsonl")]
    done, refused = "requested", "a request was refused"
    assert events == [(2, done), (3, refused), (3, refused), (4, done), (4, done)]

    # Killed after the checkpoint that was requested.
    for path in (folder / "run.json", *folder.glob("cat*.safetensors")):
        path.unlink()
    for path in folder.glob("checkpoints/step-00000[3-6]"):
        shutil.rmtree(path)
    assert exported(trained(bench, resume=True)) == plain
    assert rows(folder, "events.jsonl")[-1]["message"] == "resumed at step 2"


@contextmanager
def training_in(folder: Path, **values: object) -> Iterator[Path]:
    """A run that trains in another process, as its files tell."""
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"status": "running", "training": {}} | values), encoding="utf-8")
    with at_work(folder):
        yield folder


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["request", *arguments]) == 2
    return capsys.readouterr().err


def test_what_cannot_be_requested_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is not a run: it has no run.json" in refusal(capsys, str(tmp_path), "save")
    with training_in(tmp_path / "done", status="done") as folder:
        assert "does not train now: its status is done" in refusal(capsys, str(folder), "save")
    with training_in(tmp_path / "scored", training={"step": 9}) as folder:
        assert "does not train any more" in refusal(capsys, str(folder), "sample")
    with training_in(tmp_path / "killed") as folder:
        texts = ["--prompt", "a" * 2001, *(["--prompt", "b"] * 16)]
        text = refusal(capsys, str(folder), "prompts", *texts)
        assert "2 problems" in text
        assert "Prompt 1 has 2001 characters" in text
        assert "Name 1 to 16" in text
        assert "There are 0 prompts" in refusal(capsys, str(folder), "prompts")
        assert "not empty" in refusal(capsys, str(folder), "prompts", "--prompt", " ")
        assert "Prompts belong to the request `prompts`" in refusal(capsys, str(folder), "save", "--prompt", "a")
        assert "Did you mean save" in refusal(capsys, str(folder), "saev")
        assert not (folder / "requests").exists()
    assert "does not train now: was killed" in refusal(capsys, str(folder), "save")


def test_a_request_loads_no_torch(tmp_path: Path) -> None:
    program = "import sys; from lora_trainer.cli.main import main; code = main(sys.argv[1:]); sys.exit(code + 9 * ('torch' in sys.modules))"
    with training_in(tmp_path / "cat") as folder:
        command = [sys.executable, "-c", program, "request", str(folder), "save"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, str(folder / "requests" / "done" / "1.json")), done.stderr
    assert json.loads((folder / "requests" / "1.json").read_text("utf-8")) == {"do": "save"}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the launcher's CPU path is tested on Linux")
def test_processes_of_a_launcher_do_it_together(bench: Bench, checkout: Path) -> None:
    """Two real processes; `tests/training/test_requests.py` has simulated ones."""
    arguments = bench.arguments("two", steps=60, checkpoint__every_n_steps=500)
    with ThreadPoolExecutor(1) as pool:
        ending = pool.submit(launch, checkout, arguments, "accelerate_configs/multi_gpu.yaml", *WITHOUT_GPUS)
        places = list[Path]()
        while not places and not ending.done():
            with suppress(UsageError):
                places = [send_request(bench.folder("two"), do) for do in ("save", "sample")]
            time.sleep(0.05)
        ended = ending.result()
    assert ended.returncode == 0, ended.stderr[-3000:]
    save, sample = (json.loads(path.read_text("utf-8")) for path in places)
    assert (bench.folder("two") / "weights" / f"two-step-{save['step']:06}.safetensors").is_file()
    assert sample["result"] == f"generated samples/step-{sample['step']:06}.png"
