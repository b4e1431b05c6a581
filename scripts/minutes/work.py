"""What the tasks of `scripts/gpu_minutes.py` do, in a process that measures. `rehearse`: thin models on the CPU."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lora_trainer.benchmarks.device import device_name
from lora_trainer.benchmarks.measures import MEASURES, RequestedMeasure, Row
from lora_trainer.benchmarks.table_rows import SPECS
from lora_trainer.core.errors import Problem, UsageError, first_line, is_out_of_memory
from lora_trainer.core.hardware import cuda_memory_gib, package_versions
from lora_trainer.core.imports import hide, own_process
from lora_trainer.core.io import read_json
from lora_trainer.core.launch import CPU_VARIABLE

# What needs diffusers or peft is imported where it is used: a library that is missing costs the tasks that need it. One that
# asks for the GPU when diffusers imports it is hidden: it might take memory there beside the process that measures.
own_process()
hide(("bitsandbytes",))

Rows = list[dict[str, Any]]
ROOT = Path(__file__).resolve().parents[2]
LOSS_BOUND = 1e-3  # relative, of each loss of the run on the GPU from the CPU's
TESTS = (  # the quickest first
    "tests/monitor/test_gpu.py",
    "tests/training/test_memory_on_a_gpu.py",
    "tests/training/test_nothing_waits.py",
    "tests/recipes/test_encoder_device.py",
    "tests/training/test_on_a_gpu.py",
)
# Of single layers: weights, whether int8 is multiplied in int8, and the bounds of the relative error of linear layers and
# of convolutions. On a CPU the largest seen are 0.033, 0.0065, 0.019 and 0.116 (docs/benchmarks.md); bf16 adds 0.004.
LAYER_BOUNDS: Mapping[str, tuple[Any, bool, float, float]] = {
    "fp8": ("fp8", False, 0.045, 0.04),
    "int8": ("int8", False, 0.015, 0.015),
    "int8, int8 matmul": ("int8", True, 0.03, 0.015),
    "nf4": ("nf4", False, 0.14, 0.015),
}


def describe_device(*, rehearse: bool) -> dict[str, Any]:
    """What is measured on, and why there is no GPU, where there is none."""
    facts = {"device": device_name(), "versions": package_versions(), "reason": None}
    if rehearse:
        from lora_trainer.models import unet

        unet.THINNER = 10  # thinner than those of `bench --tiny`
        return facts | {"device": f"{facts['device']}, rehearsed"}
    return facts | {"reason": None if torch.cuda.is_available() else why_no_gpu()}


def why_no_gpu() -> str:
    """In torch's own words: no GPU, a driver that is too old, or a torch without CUDA."""
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built without CUDA"
    try:
        torch.cuda.init()
    except Exception as error:  # noqa: BLE001  RuntimeError or AssertionError, by the version
        return first_line(error)
    return "torch finds no CUDA GPU"


def examine_machine(*, rehearse: bool) -> Rows:
    """The checklist of `lora-trainer doctor`."""
    from lora_trainer.doctor.examine import diagnose, read_facts
    from lora_trainer.doctor.this_run import Described

    diagnosis = diagnose(read_facts(), Described(), None)
    return [{"name": "doctor", "is_right": not diagnosis.exit_code, **diagnosis.to_json()}]


# ---- runs


def compare_with_cpu(*, rehearse: bool) -> Rows:
    """The built-in run on the GPU and on the CPU: fp32, the same numbers by position, so that only rounding differs."""
    import check_regressions

    steps = 3 if rehearse else 30
    settings = ("hardware.tf32=false", f"hardware.threads={1 if rehearse else check_regressions.THREADS}")
    golden = check_regressions.GoldenRun(steps, arguments=tuple(p for each in settings for p in ("--set", each)))
    found = {}
    for device, cpu in (("gpu", rehearse), ("cpu", True)):
        with tempfile.TemporaryDirectory() as folder, on_device(cpu=cpu):
            found[device] = check_regressions.golden_losses(golden, Path(folder))
    pairs = [
        (own, other)
        for own, other in zip(found["gpu"]["losses"], found["cpu"]["losses"], strict=True)
        if own is not None and other is not None
    ]
    pairs.append((found["gpu"]["val_loss"], found["cpu"]["val_loss"]))
    most = max(abs(own - other) / abs(other) for own, other in pairs)
    row = {"name": "losses on the GPU against the CPU", "steps": steps, "largest": most, "bound": LOSS_BOUND}
    return [{**row, "is_right": most <= LOSS_BOUND, **found}]


def compare_resumed(*, rehearse: bool) -> Rows:
    """The same run straight, and stopped by a signal and resumed: the same losses and tensors, to the bit.

    Where attention has no deterministic form with the settings as they are, the plain formula takes its place.
    """
    found = resumed((), rehearse=rehearse)
    return [found if found["exit_codes"][0] == 0 else resumed(("hardware.attention_backend=math",), rehearse=rehearse)]


def resumed(settings: Sequence[str], *, rehearse: bool) -> dict[str, Any]:
    from safetensors.torch import load_file

    from lora_trainer.cli.main import main as lora_trainer
    from lora_trainer.monitor.trackers import read_lines

    steps, stop = (4, 2) if rehearse else (12, 5)
    with tempfile.TemporaryDirectory() as place, on_device(cpu=rehearse):
        folder = Path(place)
        quick = [f"cache.dir={folder / 'cache'}", "validation.every_n_steps=0", "sample.every_n_steps=0"]
        quick += ["gates.lora_check=off", "run.trackers=[]", "lora.dropout=0.1", "checkpoint.every_n_steps=100"]
        chosen = [part for each in (*quick, "train.deterministic=true", *settings) for part in ("--set", each)]
        train = ["train", "--seed", "7", "--max-steps", str(steps), "--output", str(folder), *chosen, "--name"]
        codes = [lora_trainer([*train, "straight"])]
        if codes[0] == 0:
            with stopped_after(stop):
                codes.append(lora_trainer([*train, "stopped"]))
            codes.append(lora_trainer([*train, "stopped", "--resume"]))
        runs = [folder / name for name in ("straight", "stopped")]
        losses = [[row["loss"] for row in read_lines(run / "metrics.jsonl")] for run in runs]
        is_whole = codes == [0, 143, 0] and len(losses[0]) == steps
        loras = [load_file(run / f"{run.name}.safetensors") for run in runs] if is_whole else [{}, {}]
    equal = sum(torch.equal(loras[0][name], loras[1].get(name, torch.empty(0))) for name in loras[0])
    is_right = is_whole and losses[0] == losses[1] and equal == len(loras[0])
    row = {"name": "stopped and resumed", "exit_codes": codes, "losses": losses, "settings": list(settings)}
    return {**row, "equal_tensors": equal, "is_right": is_right}


@contextmanager
def on_device(*, cpu: bool) -> Iterator[None]:
    """Train on the CPU, or on the GPU if there is one: accelerate chooses once in a process."""
    from accelerate import PartialState

    before = os.environ.pop(CPU_VARIABLE, None)
    if cpu:
        os.environ[CPU_VARIABLE] = "true"
    PartialState._reset_state()
    try:
        yield
    finally:
        os.environ.pop(CPU_VARIABLE, None)
        if before is not None:
            os.environ[CPU_VARIABLE] = before
        PartialState._reset_state()


@contextmanager
def stopped_after(step: int) -> Iterator[None]:
    """A signal to this process when the numbers of a step are written."""
    from lora_trainer.monitor.trackers import Trackers

    written = Trackers.steps

    def steps(trackers: Trackers, rows: list[dict[str, Any]]) -> None:
        written(trackers, rows)
        if any(row["step"] == step for row in rows):
            os.kill(os.getpid(), signal.SIGTERM)

    Trackers.steps = steps  # type: ignore[method-assign]
    try:
        yield
    finally:
        Trackers.steps = written  # type: ignore[method-assign]


# ---- tests


def run_tests(seconds: float, *, rehearse: bool) -> Rows:
    """`pytest -m gpu` for so many seconds, the quickest files first; what it passed until then counts."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-v", "-p", "no:cacheprovider", "--no-header"]
    command += TESTS[:1] if rehearse else TESTS  # without a GPU all of them are skipped
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            code = None
        output.seek(0)
        text = output.read()
    print(text)
    outcomes = re.findall(r"^(tests/\S+::.*?) (PASSED|FAILED|SKIPPED|ERROR)", text, re.MULTILINE)
    names = {word: [name for name, outcome in outcomes if outcome == word] for word in ("FAILED", "ERROR")}
    counts = {word.lower(): sum(outcome == word for _, outcome in outcomes) for word in ("PASSED", "SKIPPED")}
    wrong = [*names["FAILED"], *names["ERROR"]]
    row = {"name": "pytest -m gpu", "exit_code": code, "is_whole": code is not None, "wrong": wrong, **counts}
    return [{**row, "is_right": not wrong and code in (None, 0) and (rehearse or counts["passed"] > 0)}]


# ---- steps


def try_cap(*, rehearse: bool) -> Rows:
    """Whether a process that passes its cap is stopped: without that the capped rows show nothing."""
    if rehearse:
        raise UsageError(Problem("no_gpu", "A CPU has no cap to try.", "Measure on a GPU."))
    from lora_trainer.benchmarks.measure_row import prove_cap

    with tempfile.TemporaryDirectory() as folder:
        prove_cap(str(Path(folder) / "cap.json"))
        found = read_json(Path(folder) / "cap.json")
    return [{"name": "more than the cap raises", "is_right": found["holds"], **found}]


def measure_table_row(name: str, *, rehearse: bool) -> Rows:
    """A row of `bench table`. One that is capped and runs out of memory is a result: the plan was wrong."""
    from lora_trainer.benchmarks.measure_row import RowSettings, measure_row
    from lora_trainer.core.hardware import free_memory
    from lora_trainer.training.processes import join_processes

    (spec,) = [spec for spec in SPECS if spec.name == name]
    gib = cuda_memory_gib()
    if rehearse and spec.settings.get("compile.enabled"):
        raise UsageError(Problem("no_gpu", "Nothing is compiled on a CPU in so little time.", "Measure on a GPU."))
    if gib is not None and spec.cap_gib is not None and spec.cap_gib > gib + 1:  # one of 24 GB has 23.5 GiB
        raise UsageError(
            Problem(
                "gpu_too_small", f"It needs a GPU of {spec.cap_gib:g} GB, and this one has {gib:.0f}.", "Leave it out."
            )
        )
    warm_up, steps = (2, 4) if spec.part == "memory" else (5, 15)
    how = RowSettings(1, 2, tiny=True) if rehearse else RowSettings(warm_up, steps)
    try:
        row = measure_row(spec, how)
    except Exception as error:
        if spec.cap_gib is None or not is_out_of_memory(error):
            raise
        row = Row(spec.name, spec.family, figures={"failed": f"out of memory: {first_line(error)}"})
    finally:
        free_memory(join_processes().device)
    return [{**row.to_json(), "is_right": row["failed"] is None}]


def compare_layers(*, rehearse: bool) -> Rows:
    """Quantized layers in bf16 against the dense ones in fp32: outputs and gradients of the inputs."""
    from lora_trainer.models.quantization.store import make_quantizer
    from lora_trainer.training.processes import join_processes

    device, rows = join_processes().device, list[dict[str, Any]]()
    width, side = (64, 8) if rehearse else (1280, 32)
    for name, (stored, products, of_linear, of_convolution) in LAYER_BOUNDS.items():
        torch.manual_seed(0)
        layers = {
            "linear": (nn.Linear(width, 2 * width), torch.randn(2 * side * side, width), of_linear),
            "convolution": (nn.Conv2d(width, width, 3, padding=1), torch.randn(1, width, side, side), of_convolution),
        }
        for kind, (layer, x, bound) in layers.items():
            layer = layer.to(device).requires_grad_(False)
            exact = outputs_of(layer, x.to(device))
            narrow = make_quantizer(stored, products=products, by=device)
            assert narrow is not None
            layer = layer.bfloat16()
            narrow(layer)
            pairs = zip(outputs_of(layer, x.to(device, torch.bfloat16)), exact, strict=True)
            errors = [float((own.float() - right).norm() / right.norm()) for own, right in pairs]
            row = {"name": f"{name}, {kind}", "output": errors[0], "gradient": errors[1], "bound": bound}
            rows.append({**row, "is_right": max(errors) <= bound})
    return rows


def outputs_of(layer: nn.Module, x: Tensor) -> list[Tensor]:
    """The layer's output, and the gradient of its input for a fixed gradient of the output."""
    x = x.detach().clone().requires_grad_()
    y = layer(x)
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    y.backward(upstream)
    assert x.grad is not None
    return [y.detach(), x.grad]


# ---- measurements of `bench`


def time_attention(family: str, *, rehearse: bool) -> Rows:
    """`bench attention`: of all layers of a model, and at each of its sizes."""
    rows = bench("attention", family, 2 if rehearse else 10, rehearse=rehearse)
    return [{**row, "is_right": row["error"] < 0.03} for row in rows]


def time_together(family: str, *, rehearse: bool) -> Rows:
    """`bench together`: 1, 2, 4 and 8 LoRAs on one base model."""
    return bench("together", family, 2 if rehearse else 4, rehearse=rehearse)


def bench(what: str, family: str, steps: int, *, rehearse: bool) -> Rows:
    from lora_trainer.benchmarks.measure_row import settle_settings
    from lora_trainer.run.inputs import data_in_use

    values: dict[str, Any] = {"model.family": family, "lora.rank": 16, "lora.target_modules": "attention"}
    values |= {"train.effective_batch_size": 1}
    if rehearse:
        values |= {"data.resolution": 64 if family == "sd15" else 128, "memory.weight_dtype": "fp32"}
    with data_in_use():
        request = RequestedMeasure(settle_settings(values), steps, tiny=rehearse, subjects=("own",))
        report = MEASURES[what](request)
    for note in report.notes:
        print(note)
    return rows_with(report.rows)


def rows_with(rows: Sequence[Any]) -> Rows:
    return [{**row.to_json(), "is_right": True} for row in rows]
