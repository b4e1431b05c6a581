"""Compiled regions: one compilation per shape and size, none for evaluation, and their messages.

Traced by torch's dynamo and autograd, without Inductor: `test_inductor.py` tests that.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lora_trainer.adapters.base import AdapterOptions
from lora_trainer.adapters.lora import inject_lora
from lora_trainer.cli.main import main
from lora_trainer.core import compilations
from lora_trainer.core.compilations import keep_compilations
from lora_trainer.models.compiled import (
    Compiled,
    compile_blocks,
    compiler_message,
    count,
    is_compiler_error,
    repeated_blocks,
)
from lora_trainer.models.families import FAMILIES
from tests.conftest import needs_links
from tests.lora_format.tiny import T5_WIDTH, TRANSFORMERS, UNETS, tiny_transformer, tiny_unet

pytestmark = pytest.mark.filterwarnings("ignore")  # from torch, while it traces
REAL = torch.compile


class Block(nn.Module):
    breaks = False

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        if self.breaks:
            torch._dynamo.graph_break()
        return x + self.layer(x).tanh()


class Denoiser(nn.Module):
    _repeated_blocks = ("Block",)

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for width in widths)

    def forward(self, x: Tensor, again: bool = False) -> Tensor:
        for block in self.blocks:
            wide = x[..., : block.layer.in_features].contiguous()
            x = checkpoint(block, wide, use_reentrant=False) if again else block(wide)
        return x


@pytest.fixture(autouse=True)
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def without_mode(function, *, mode: str, **args):
        return REAL(function, backend="aot_eager", **args)

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", without_mode)
    yield
    torch._dynamo.reset()


def denoiser(widths: tuple[int, ...] = (8, 8, 6, 6)) -> Denoiser:
    torch.manual_seed(0)
    model = Denoiser(widths).requires_grad_(False)
    inject_lora(model, [f"blocks.{n}.layer" for n in range(len(widths))], AdapterOptions(2, 2.0), 0)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_B" in name:
                value.normal_()
    return model


def gradients(model: Denoiser, x: Tensor, again: bool = False) -> list[Tensor]:
    model(x, again).square().mean().backward()
    found = [value.grad.clone() for value in model.parameters() if value.grad is not None]
    model.zero_grad()
    return found


def with_regions(model: Denoiser, **args: bool) -> Compiled:
    return compile_blocks(model, mode="default", **{"dynamic": False, "fullgraph": True, **args})


def test_equal_blocks_share_a_compilation_for_each_size() -> None:
    plain, model = denoiser(), denoiser()
    compiled, before = with_regions(model), count().graphs
    assert (compiled.kinds, compiled.forms) == ({"Block": 4}, 2)
    graphs = []
    for samples in (3, 3, 2, 3):
        x = torch.randn(samples, 8)
        for found, wanted in zip(gradients(model, x), gradients(plain, x), strict=True):
            torch.testing.assert_close(found, wanted)
        graphs.append(count().graphs - before)
    # Two block types, and the first block's input needs no gradient.
    assert graphs == [3, 3, 6, 6]
    news = compiled.news()
    assert news is not None
    assert news.startswith("compiled 6 graphs in ")
    assert "no graph break" in news
    assert compiled.news() is None


@pytest.mark.parametrize("hooked", [(0, 2), (1, 3)])
def test_blocks_whose_layers_have_hooks_do_not_run_the_code_of_others(hooked: tuple[int, ...]) -> None:
    """As with a training adapter that is on some of the blocks."""
    plain, model = denoiser((8, 8, 8, 8)), denoiser((8, 8, 8, 8))
    for each in (plain, model):
        for place in hooked:
            each.blocks[place].layer.base_layer.register_forward_hook(lambda layer, inputs, output: output * 2)
    with_regions(model)
    x = torch.randn(3, 8)
    for found, wanted in zip(gradients(model, x), gradients(plain, x), strict=True):
        torch.testing.assert_close(found, wanted)


def test_evaluation_and_other_values_compile_nothing() -> None:
    model, x = denoiser((8, 8)), torch.randn(2, 8)
    with_regions(model)
    wanted = gradients(model, x)
    before = count().graphs
    model.eval()
    with torch.no_grad():
        model(x)
        for name, value in model.named_parameters():
            if "lora" in name:
                torch._foreach_copy_([value], [value.clone()])
    model.train()
    for again in (False, True):  # the checkpoint lies around the region
        assert all(map(torch.equal, gradients(model, x, again), wanted))
    assert count().graphs == before


def test_a_dynamic_compilation_serves_all_sizes() -> None:
    model = denoiser((8, 8))
    with_regions(model, dynamic=True)
    gradients(model, torch.randn(3, 8))
    before = count().graphs
    for samples in (4, 5, 7):
        gradients(model, torch.randn(samples, 8))
    assert count().graphs == before


def test_disabled_compilation_runs_blocks_eagerly() -> None:
    model, x = denoiser(), torch.randn(2, 8)
    compiled, before = with_regions(model), count().graphs
    with compiled.off():
        gradients(model, x)
    assert count().graphs == before
    assert compiled.on


def test_graph_breaks_are_counted_or_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Block, "breaks", True)
    model = denoiser((8,))
    compiled = with_regions(model, fullgraph=False)
    gradients(model, torch.randn(2, 8))
    news = compiled.news()
    assert news is not None
    assert "1 graph break, the first: Call to `torch._dynamo.graph_break()`" in news
    torch._dynamo.reset()
    with_regions(strict := denoiser((8,)))
    with pytest.raises(torch._dynamo.exc.Unsupported) as refused:
        gradients(strict, torch.randn(2, 8))
    assert is_compiler_error(refused.value)


def test_an_error_of_the_model_is_not_the_compilers() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.zeros(2, 3) @ torch.zeros(2, 3)
    assert not is_compiler_error(raised.value)


def test_repeated_blocks_are_found_in_the_families() -> None:
    """Every block that gradient checkpointing recomputes is compiled, of every family."""

    def kinds(module: nn.Module) -> set[str]:
        return {type(block).__name__ for block in repeated_blocks(module)}

    for family in UNETS:
        assert kinds(tiny_unet(family)) == {"ResnetBlock2D", "BasicTransformerBlock"}
    for name in TRANSFORMERS:
        model = tiny_transformer(name)
        layers = [each for each in model.children() if isinstance(each, nn.ModuleList) and len(each) > 1]
        assert kinds(model) >= {type(block).__name__ for each in layers for block in each} > set(), name


def test_anima_compiles_as_a_whole_block_and_learns_the_same() -> None:
    """diffusers lists no repeated blocks of Cosmos; nothing in one breaks the graph."""
    family = FAMILIES["anima"].denoiser
    cond = {"embeds": torch.randn(2, 512, T5_WIDTH)}
    noisy, t, sizes = torch.randn(2, 16, 8, 12), torch.tensor([3, 900]), torch.zeros(2, 6)
    found = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        model = family.make(tiny_transformer("anima").config).requires_grad_(False)
        inject_lora(model, [f"transformer_blocks.{n}.attn2.to_q" for n in range(2)], AdapterOptions(2, 2.0), 0)
        if is_compiled:
            compiled, before = with_regions(model), count().graphs
            assert (compiled.kinds, compiled.forms) == ({"CosmosTransformerBlock": 2}, 1)
        velocity = family.predict(model, noisy, t, cond, sizes)
        velocity.square().mean().backward()
        trained = [value.grad for value in model.parameters() if value.grad is not None]
        assert any(each.abs().max() > 0 for each in trained)
        found.append([velocity.detach(), *trained])
    assert count().graphs > before
    for eager, other in zip(*found, strict=True):
        torch.testing.assert_close(other, eager, atol=1e-6, rtol=1e-4)


def test_the_compile_cache_is_in_a_private_folder(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("LORA_TRAINER_CACHE", str(tmp_path))
    at_the_end = list[tuple[object, ...]]()
    monkeypatch.setattr(compilations.tempfile, "mkdtemp", lambda **_: str(tmp_path / "own"))
    monkeypatch.setattr(compilations.atexit, "register", lambda *args, **_: at_the_end.append(args))
    monkeypatch.setenv(compilations.KEPT_IN, "")
    assert keep_compilations() is None
    folder = tmp_path / "compiled"
    assert compilations.os.environ[compilations.KEPT_IN] == str(folder)
    assert not folder.stat().st_mode & 0o077
    folder.chmod(0o770)
    monkeypatch.setenv(compilations.KEPT_IN, "")
    messages = keep_compilations()
    assert messages is not None
    assert "others may write to it" in messages
    assert compilations.os.environ[compilations.KEPT_IN] != str(folder)
    assert at_the_end == [(compilations.shutil.rmtree, str(tmp_path / "own"))]
    monkeypatch.setenv(compilations.KEPT_IN, "the user's own")
    assert keep_compilations() is None


CPP = """CppCompileError: C++ compile error

Command:
g++ /tmp/header.hpp -Werror=all -o /tmp/header.i

Output:
In file included from header.hpp:1:
x.cpp:3:1: fatal error: omp.h: No such file or directory
compilation terminated.

"""
AROUND = "Set TORCHDYNAMO_VERBOSE=1 for the internal stack trace (please do this especially if you're reporting a bug)"


@pytest.mark.parametrize(
    ("message", "line"),
    [
        (CPP, "x.cpp:3:1: fatal error: omp.h: No such file or directory"),
        (
            "backend='inductor' raised:\nImportError: Cannot find a working triton.\n\n",
            "ImportError: Cannot find a working triton",
        ),
        ("at 12:3:\n    y = tl.load(x)\n    ^\nvalue is not defined\n", "value is not defined"),
        ("no such instruction", "no such instruction"),
    ],
)
def test_the_line_with_the_cause_of_a_compiler_error_is_reported(message: str, line: str) -> None:
    assert compiler_message(RuntimeError(message + AROUND)) == line


@needs_links
def test_the_cache_commands_show_and_prune_compiled_files(monkeypatch: pytest.MonkeyPatch, tmp_path, capsys) -> None:
    monkeypatch.setenv("LORA_TRAINER_CACHE", str(tmp_path))
    monkeypatch.setenv(compilations.KEPT_IN, "")
    assert keep_compilations() is None
    (folder := tmp_path / "compiled" / "ab").mkdir()
    (outside := tmp_path / "outside").write_bytes(b"1")
    for name, days in (("old", 31), ("new", 29)):
        (folder / name).write_bytes(bytes(1000))
        used = time.time() - days * 86400
        os.utime(folder / name, (used, used))
    os.utime(outside, (0, 0))
    (folder / "link").symlink_to(outside)
    assert main(["cache", "status"]) == 0
    assert f"{tmp_path / 'compiled'}: " in (output := capsys.readouterr().out)
    assert "of compiled blocks" in output
    (tmp_path / "compiled").chmod(0o770)
    assert main(["cache", "prune"]) == 0
    assert (folder / "old").exists()  # others may have put it there
    (tmp_path / "compiled").chmod(0o700)
    assert main(["cache", "prune"]) == 0
    assert "1 KB removed" in capsys.readouterr().out
    assert sorted(path.name for path in folder.iterdir()) == ["link", "new"]
    assert outside.exists()
    assert main(["cache", "prune", str(tmp_path / "compiled")]) == 2  # is no cache of entries


@pytest.mark.slow
def test_regions_are_given_sequences_in_order_on_a_cpu() -> None:
    """So the order of sizes compiles nothing new, except for images, where order matters."""
    model, plain = denoiser((8,)), denoiser((8,))
    with_regions(model)
    in_order, image = torch.randn(2, 5, 8), torch.randn(2, 3, 4, 8)
    views = [in_order.transpose(1, 2).contiguous().transpose(1, 2), image.to(memory_format=torch.channels_last)]
    for x, view, more in ((in_order, views[0], 0), (image, views[1], 1)):
        model.blocks[0](x)
        before = count().graphs
        torch.testing.assert_close(model.blocks[0](view), plain.blocks[0](x))
        assert count().graphs - before == more
