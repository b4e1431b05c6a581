"""On a GPU: steps equal those of the CPU, stay under the memory cap, and attention is probed."""

from __future__ import annotations

import json
from contextlib import closing

import pytest
import torch
from accelerate import PartialState

from lora_trainer.benchmarks.bench_table import run_in_child
from lora_trainer.benchmarks.measure_row import prove_cap
from lora_trainer.cli.main import main
from lora_trainer.config.schema import Config, MemorySection
from lora_trainer.data.loader import prefetch
from lora_trainer.models.attention.backends import BACKENDS
from lora_trainer.models.attention.choose import choose_attention, fastest_attention
from lora_trainer.models.attention.probe import time_attention
from lora_trainer.models.attention.shapes import AttentionShape
from lora_trainer.monitor.gpu import open_gpus
from lora_trainer.monitor.memory import gpu_pool
from lora_trainer.run.choices import cap_memory
from lora_trainer.training.micro_batch import MicroBatch, make_copier
from tests.recipes.recipe import Bench, draw_images, losses, patched, save_tiny_model

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("gpu")
    return Bench(save_tiny_model(folder), draw_images(folder / "data"), folder / "runs", folder / "cache")


def test_a_run_on_the_gpu_is_the_run_on_the_cpu(place):
    """fp32 with the same random numbers by position: six steps differ only by rounding."""
    assert place.run("gpu", data__resolution=64) == 0
    PartialState._reset_state()  # the device is chosen once per process
    with patched(torch.accelerator, "is_available", lambda: False):
        assert place.run("cpu", data__resolution=64) == 0
    PartialState._reset_state()
    assert losses(place.folder("gpu")) == pytest.approx(losses(place.folder("cpu")), rel=1e-3)


def test_the_step_stays_under_its_vram_preset(capsys):
    arguments = ["bench", "step", "--preset", "6gb", "--set", "model.family=sd15", "--set", "data.resolution=512"]
    assert main([*arguments, "--steps", "2", "--json"]) == 0
    ours = json.loads(capsys.readouterr().out)["rows"][1]
    assert 0.0 < ours["peak_gib"] < 6.0
    assert all(seconds >= 0.0 for seconds in ours["split"].values())
    assert 0.5 < sum(ours["split"].values()) / ours["seconds_median"] < 2.0


def test_checkpointing_frees_memory_and_keeps_the_losses(capsys):
    arguments = ["--set", "model.family=sd15", "--set", "data.resolution=512", "--steps", "2", "--json"]
    ways = ["--compare", "memory.gradient_checkpointing=true", "--set", "memory.gradient_checkpointing=false"]
    assert main(["bench", "step", *arguments, *ways]) == 0
    without, checkpointed = json.loads(capsys.readouterr().out)["rows"]
    assert checkpointed["peak_gib"] < without["peak_gib"]
    assert checkpointed["loss_mean"] < 1e-2


def test_offloading_moves_activations_to_host_memory(capsys):
    arguments = ["--set", "model.family=sd15", "--set", "data.resolution=512", "--steps", "2", "--json"]
    assert main(["bench", "memory", *arguments]) == 0
    ratios = {row["name"]: row["ratio"] for row in json.loads(capsys.readouterr().out)["rows"]}
    assert all(ratios[part] == pytest.approx(1.0, rel=0.02) for part in ("weights", "adapter"))
    plain = ["--set", "memory.gradient_checkpointing=false"]
    assert main(["bench", "step", *arguments, *plain, "--compare", "memory.offload_activations=true"]) == 0
    without, offloaded = json.loads(capsys.readouterr().out)["rows"]
    assert offloaded["peak_gib"] < without["peak_gib"]
    assert offloaded["loss_mean"] < 1e-2


def test_the_cap_of_a_capped_row_holds(tmp_path):
    assert run_in_child(prove_cap, (), tmp_path / "cap.json", 120.0) == {"holds": True, "failed": None}


def test_a_row_of_the_table_is_measured_in_a_process_of_its_own(tmp_path, capsys):
    file = tmp_path / "rows.json"
    assert main(["bench", "table", "--filter", "sd15 512 batch 4", "--steps", "3", "--rows", str(file), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["failed"] is None
    assert 0.0 < row["seconds_p10"] <= row["seconds_median"] <= row["seconds_p90"]
    assert 0.0 < row["peak_gib"] <= row["reserved_gib"]
    assert row["error"] == pytest.approx(0.0, abs=0.25)
    assert len(row["losses"]) == 13


def test_more_than_the_cap_raises_and_nothing_spills():
    device = torch.device("cuda", torch.cuda.current_device())
    before = torch.cuda.get_per_process_memory_fraction(device)
    free, total = torch.cuda.mem_get_info(device)
    try:
        cap_memory(Config(memory=MemorySection(limit_gib=2.6)), device)
        assert torch.cuda.get_per_process_memory_fraction(device) == pytest.approx(2.0 * 2**30 / total)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(int(2.5 * 2**30), dtype=torch.uint8, device=device)
        allocator = gpu_pool(device)
        assert allocator is not None
        assert allocator.reserved <= allocator.limit
        assert free - torch.cuda.mem_get_info(device)[0] < 2**30
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)


def test_the_gpu_reports_its_state():
    pytest.importorskip("pynvml")
    (sample,), _ = open_gpus([torch.device("cuda", torch.cuda.current_device())])
    gpu = sample()
    assert 0.0 <= gpu.utilization <= 1.0
    assert 0.0 < gpu.memory <= 1.0
    assert 0.0 < gpu.celsius < 120.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_fast_attention_backend_passes_its_probe(dtype):
    shapes = [AttentionShape(2, 8, 1024, keys, size) for size in (40, 64, 80) for keys in (1024, 77)]
    chosen = choose_attention("auto", ("xformers", "sdpa", "math"), dtype, torch.device("cuda"), shapes)
    assert chosen.name in {"xformers", "sdpa"}, chosen.reason


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_backends_are_timed_on_the_gpu(dtype):
    shapes = [AttentionShape(1, 10, 4096, keys, 64, layers=10) for keys in (4096, 77)]
    names = tuple(name for name in BACKENDS if name != "math")
    chosen = fastest_attention(names, dtype, torch.device("cuda"), shapes)
    assert chosen.name in names
    rows = time_attention(shapes, dtype, torch.device("cuda"), steps=3)
    assert all(row["failure"] or row["seconds_median"] > 0.0 for row in rows)


def test_prefetched_copies_are_complete():
    """Read ahead in a thread, copied in their own stream, used while the device is busy, in reused memory."""
    device = torch.device("cuda", torch.cuda.current_device())
    busy = torch.randn(2048, 2048, device=device)

    def micro(number: int) -> MicroBatch:
        values = torch.full((2, 4, 64, 64), float(number))
        cond = {"embeds": torch.full((2, 77, 768), float(number))}
        return MicroBatch(values, values, values, torch.zeros(2), cond, torch.zeros(2, 6), torch.ones(2), values[:, :1])

    copied = make_copier(device, torch.bfloat16)
    sums = []
    with closing(prefetch((copied([micro(number)]) for number in range(50)), 4)) as source:
        for micros in source:
            for _ in range(5):
                busy = busy @ busy / 2048**0.5
            moved = micros[0].to(device, torch.bfloat16)
            assert moved.latents.device == device
            assert moved.cond["embeds"].dtype == torch.bfloat16
            sums.append((moved.latents.mean(), moved.noise.mean(), moved.cond["embeds"].float().mean()))
            del micros, moved
    assert [tuple(map(float, each)) for each in sums] == [(float(number),) * 3 for number in range(50)]


def test_a_large_step_stays_in_pinned_memory():
    device = torch.device("cuda", torch.cuda.current_device())
    values = torch.zeros(2, 16, 256, 256)
    large = MicroBatch(values, values, values, torch.zeros(2), {}, torch.zeros(2, 6), torch.ones(2))
    (staged,) = make_copier(device, torch.bfloat16)([large])
    assert staged.latents.device.type == "cpu"
    assert staged.latents.is_pinned()
    assert staged.to(device, torch.bfloat16).latents.device == device


def test_encoding_while_training_equals_encoding_before(place):
    """Without cached latents the VAE runs during the step, in its own stream."""
    assert place.run("cached", data__resolution=64) == 0
    assert place.run("fresh", data__resolution=64, cache__latents="false") == 0
    assert losses(place.folder("fresh")) == pytest.approx(losses(place.folder("cached")), rel=1e-3)
