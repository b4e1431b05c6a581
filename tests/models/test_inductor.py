"""Compiling with Inductor: every mode, a broken C++ compiler, and a workaround for a bug."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import get_args

import pytest
import torch
import torch._inductor.config as inductor
from diffusers.models.attention import BasicTransformerBlock
from torch import Tensor, nn

from lora_trainer.adapters.base import AdapterOptions
from lora_trainer.adapters.lora import inject_lora
from lora_trainer.config.schema.machine import CompileMode
from lora_trainer.models.compiled import compile_blocks, compiler_message, is_compiler_error

pytestmark = pytest.mark.filterwarnings("ignore")  # from torch, while it compiles


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x).tanh()


class Denoiser(nn.Module):
    _repeated_blocks = ("Block",)

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Tensor | None) -> Tensor:
        result: Tensor = self.block(*args)
        return result


@pytest.fixture(scope="module")
def compiled_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("inductor")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, compiled_in: Path) -> Iterator[None]:
    """Compiled in a folder of these tests. The slow trial of the C++ compiler is skipped."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(compiled_in))
    torch._dynamo.reset()
    with inductor.patch({"cpp.vec_isa_ok": True}):
        yield
    torch._dynamo.reset()


def denoiser(block: Callable[[], nn.Module], layers: list[str]) -> Denoiser:
    """The same each time, with a LoRA on those layers of its one block."""
    torch.manual_seed(0)
    model = Denoiser(block()).requires_grad_(False)
    inject_lora(model, [f"block.{layer}" for layer in layers], AdapterOptions(2, 2.0), 0)
    for name, value in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(value)
    return model


def gradients(model: nn.Module, x: Tensor, *more: Tensor | None) -> list[Tensor]:
    """The gradients of the first input and of the LoRA."""
    first = x.detach().requires_grad_()
    model(first, *more).square().mean().backward()
    assert first.grad is not None
    return [first.grad, *(value.grad for value in model.parameters() if value.grad is not None)]


@pytest.mark.slow
@pytest.mark.parametrize("mode", get_args(CompileMode))
def test_each_mode_compiles_and_computes_what_eager_does(mode: str) -> None:
    plain, model, x = denoiser(Block, ["layer"]), denoiser(Block, ["layer"]), torch.randn(2, 8)
    wanted = torch._inductor.list_mode_options(mode)
    seen: list[dict[str, object]] = []

    def inspect_graph(graph: torch.fx.Graph) -> None:
        """Called by torch for each graph, to record its settings."""
        seen.append({name: inductor.get_config_copy()[name] for name in wanted})

    with inductor.patch(post_grad_custom_post_pass=inspect_graph):
        compiled = compile_blocks(model, mode=mode, dynamic=False, fullgraph=True)
        for found, eager in zip(gradients(model, x), gradients(plain, x), strict=True):
            torch.testing.assert_close(found, eager)
    assert str(compiled.news()).startswith("compiled 1 graph in ")
    assert seen == [wanted] * 2, "forward and backward"


@pytest.mark.skipif(os.name != "posix", reason="a shell script in the place of g++")
def test_errors_of_a_broken_compiler_are_recognized(tmp_path: Path) -> None:
    """It exists and prints its version for the search, and then compiles nothing."""
    broken = tmp_path / "g++"
    broken.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exec g++ --version\necho "x.cpp:3:1: fatal error: no space" >&2\nexit 1\n',
        encoding="utf-8",
    )
    broken.chmod(0o755)
    model = denoiser(Block, ["layer"])
    with inductor.patch({"cpp.cxx": (str(broken),), "fx_graph_cache": False}):
        compile_blocks(model, mode="default", dynamic=False, fullgraph=True)
        with pytest.raises(Exception, match="CppCompileError") as raised:
            gradients(model, torch.randn(3, 8))
    assert is_compiler_error(raised.value)
    assert compiler_message(raised.value) == "x.cpp:3:1: fatal error: no space"


@pytest.mark.slow
def test_the_gradient_of_a_transposed_view_is_right() -> None:
    """As U-Nets pass it to the first transformer block of a level; see docs/tried.md."""

    block = partial(BasicTransformerBlock, 128, 8, 16, cross_attention_dim=768)
    layers = [f"{attention}.{name}" for attention in ("attn1", "attn2") for name in ("to_q", "to_k", "to_v")]
    compiled, exact = denoiser(block, layers), denoiser(block, layers).double()
    compile_blocks(compiled, mode="default", dynamic=False, fullgraph=True)
    x, text = torch.randn(1, 128, 64).transpose(1, 2), torch.randn(1, 77, 768)
    wanted = gradients(exact, x.double(), None, text.double())
    for found, right in zip(gradients(compiled, x, None, text), wanted, strict=True):
        assert (found - right).norm() < 1e-5 * right.norm()
