"""Attention backends: shapes of a denoiser, which work, which is fastest, and what a denoiser computes with one."""

from __future__ import annotations

import inspect
import sys
import types
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from diffusers.models.attention import Attention
from functorch.compile import make_boxed_func
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode

from lora_trainer.core.errors import UsageError
from lora_trainer.models.attention.backends import BACKENDS, KERNELS, cache_signature, set_attention_backend
from lora_trainer.models.attention.choose import choose_attention, fastest_attention
from lora_trainer.models.attention.probe import probe, time_attention
from lora_trainer.models.attention.shapes import AttentionShape, shapes_of, small_shapes
from lora_trainer.models.compiled import compile_blocks, count
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.families.anima import cosmos_transformer
from lora_trainer.models.memory.checkpointing import checkpoint_blocks
from tests.lora_format.tiny import tiny_transformer, tiny_unet

CPU = torch.device("cpu")
SMALL = (AttentionShape(1, 2, 64, 64, 16),)
ORDER = ("xformers", "sdpa", "math")


def broken(*_: object) -> None:
    raise NotImplementedError("no operator")


def choose(wanted: str, order: tuple[str, ...], shapes: tuple[AttentionShape, ...] = SMALL, dtype=torch.float32):
    return choose_attention(wanted, order, dtype, CPU, shapes)


def test_a_backend_falls_back_with_a_reason_and_is_refused_when_required(monkeypatch):
    monkeypatch.setitem(BACKENDS, "xformers", broken)
    choice = choose("xformers", ORDER)
    assert choice.name == "sdpa"
    assert "64 tokens" in choice.reason
    assert choice.failures == ("xformers does not run on cpu in float32 at head size 16",)
    with pytest.raises(UsageError, match=r"hardware\.attention_backend=xformers"):
        choose("xformers", ())


def test_a_missing_package_is_named_with_its_installation(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(UsageError, match="pip install flash-attn"):
        choose("flash2", ())
    (failure,) = choose("flash2", ("sdpa",)).failures
    assert "flash2 is not installed" in failure


def test_xformers_without_a_kernel_is_detected_silently(capfd):
    pytest.importorskip("xformers")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        failure = probe("xformers", torch.float32, CPU, SMALL)
    assert failure is not None
    assert "xformers" in failure
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (lambda q, k, v: q * float("nan"), "not finite"),
        (lambda q, k, v: q, "off, more than"),
        (lambda q, k, v: BACKENDS["math"](q, k, v.detach()), "gradients that are missing"),
        (lambda q, k, v: BACKENDS["math"](q.detach(), k, v) + 0 * q, "gradients that are 100.0% off"),
        (lambda q, k, v: BACKENDS["math"](q, k, v).detach(), "does not run"),
        (lambda q, k, v: BACKENDS["math"](2 * q, k, v), "off, more than"),
    ],
)
def test_wrong_values_and_gradients_are_found(monkeypatch, wrong, expected):
    monkeypatch.setitem(BACKENDS, "sdpa", wrong)
    assert expected in str(probe("sdpa", torch.float32, CPU, SMALL))
    assert choose("auto", ("sdpa", "math")).name == "math"


def test_an_error_in_the_last_head_alone_is_found(monkeypatch):
    def last_wrong(query, key, value):
        mixed = BACKENDS["math"](query, key, value)
        return torch.cat([mixed[:, :-1], 2 * mixed[:, -1:]], dim=1)

    monkeypatch.setitem(BACKENDS, "sdpa", last_wrong)
    assert probe("sdpa", torch.float32, CPU, [AttentionShape(2, 3, 8, 5, 4)]) is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("backward", [False, True])
def test_a_single_wrong_token_among_many_is_found(monkeypatch, dtype, backward):
    def one_lost(query, key, value):
        mixed = BACKENDS["math"](query, key, value)
        kept = torch.ones(400, 1, dtype=dtype).index_fill_(0, torch.tensor([399]), 0.0)
        if not backward:
            return mixed * kept
        return mixed * kept + (BACKENDS["math"](query.detach(), key, value) * (1 - kept))

    monkeypatch.setitem(BACKENDS, "sdpa", one_lost)
    failure = probe("sdpa", dtype, CPU, [AttentionShape(1, 1, 400, 64, 16)])
    assert failure is not None
    assert ("gradients" if backward else "values") in failure
    assert dtype == torch.float32 or "100.0% off for single tokens, more than 25.0%" in failure


def test_out_of_memory_is_a_reason(monkeypatch):
    def greedy(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setitem(BACKENDS, "flash", greedy)
    assert "runs out of memory" in str(probe("flash", torch.float32, CPU, SMALL))


@given(
    st.builds(
        AttentionShape, st.integers(1, 3), st.integers(1, 3), st.integers(1, 80), st.integers(1, 80), st.integers(1, 80)
    ),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_torchs_own_attention_is_right_at_every_size(shape, dtype):
    assert probe("sdpa", dtype, CPU, [shape]) is None


PACKAGES = {
    "flash2": ("flash_attn", "flash_attn"),
    "flash3": ("flash_attn_interface", "flash_attn_interface"),
    "xformers": ("xformers", "xformers.ops"),
}


def fake_package(monkeypatch: pytest.MonkeyPatch, name: str) -> list[torch.Size]:
    """Puts a substitute in the place of a backend's package; returns the shapes of queries, which grow with its calls."""
    shapes = []

    def tokens_first(query, key, value):
        shapes.append(query.shape)
        mixed = BACKENDS["math"](*(part.transpose(1, 2) for part in (query, key, value))).transpose(1, 2)
        return (mixed, None) if name == "flash3" else mixed

    package, module = PACKAGES[name]
    fake = types.ModuleType(module)
    fake.flash_attn_func = fake.memory_efficient_attention = tokens_first
    outer = fake if package == module else types.ModuleType(package)
    outer.ops = fake
    monkeypatch.setitem(sys.modules, package, outer)
    monkeypatch.setitem(sys.modules, module, fake)
    return shapes


@pytest.mark.parametrize("name", PACKAGES)
def test_packages_get_tokens_before_heads(monkeypatch, name):
    shapes = fake_package(monkeypatch, name)
    assert choose(name, ()).name == name
    assert shapes == [(1, 64, 2, 16)]


def test_the_fastest_has_the_least_time_over_all_layers(monkeypatch):
    seconds = {"sdpa": (0.001, 0.004), "math": (0.003, 0.001), "flash": (0.0, 0.0)}
    shapes = (AttentionShape(1, 2, 16, 16, 8, layers=2), AttentionShape(1, 2, 16, 4, 8, layers=1))

    def race(names, dtype, device, shape, steps):
        return {name: [seconds[name][shapes.index(shape)]] * steps for name in names}

    monkeypatch.setattr("lora_trainer.models.attention.choose.race", race)
    monkeypatch.setitem(BACKENDS, "flash", broken)
    names = ("sdpa", "math", "flash")
    choice = fastest_attention(names, torch.float32, CPU, shapes)
    assert choice.name == "sdpa"  # 2 x 1 + 4 ms against 2 x 3 + 1
    assert "sdpa 6.00 ms, math 7.00 ms" in choice.reason
    assert "flash does not run" in "".join(choice.failures)
    other = torch.tensor([0.1, 0.001, float("inf")])  # of another process
    assert fastest_attention(names, torch.float32, CPU, shapes, lambda mine: mine + other).name == "math"
    monkeypatch.setitem(BACKENDS, "sdpa", broken)
    monkeypatch.setitem(BACKENDS, "math", broken)
    with pytest.raises(UsageError, match="No attention works here"):
        fastest_attention(names, torch.float32, CPU, shapes)


def test_timing_gives_a_row_for_each_shape_and_name():
    rows = time_attention([replace(SMALL[0], layers=3)], torch.float32, CPU, steps=3, names=("sdpa", "efficient"))
    good, bad = rows
    assert good["name"] == "sdpa"
    assert good["layers"] == 3
    assert 0.0 < good["seconds_p10"] <= good["seconds_median"] <= good["seconds_p90"]
    assert "efficient does not run on cpu" in str(bad["failure"])
    assert "seconds_median" not in bad


@pytest.mark.parametrize("family", ["sd15", "sd2", "sdxl"])
def test_the_attention_shapes_of_a_denoiser_are_those_it_computes(family):
    unet = tiny_unet(family)
    found = shapes_of(
        unet,
        FAMILIES[family].denoiser.predict,
        (2, 4, 16, 8),
        FAMILIES[family].text.cond_shapes(dict(unet.config)),
        torch.float32,
    )
    assert {(shape.batch, shape.queries) for shape in found} == {(2, 128), (2, 32)}
    assert {shape.keys for shape in found} == {128, 32, 77}
    assert sum(shape.layers for shape in found) == sum(hasattr(m, "to_q") for m in unet.modules())
    assert {shape.size for shape in found} == {shape.size for shape in small_shapes(unet)}
    assert not any(parameter.is_meta for parameter in unet.parameters())


def test_a_meta_forward_pass_leaves_nothing_in_the_denoiser():
    """Z-Image caches its position table in the first pass, and a GPU run checks shapes before that."""
    family, denoiser = FAMILIES["z_image"], tiny_transformer("z_image")
    cond = {"embeds": (4, 64), "padding": (4,)}
    assert shapes_of(denoiser, family.denoiser.predict, (1, 16, 8, 8), cond, torch.float32)
    conditioning = {"embeds": torch.randn(1, 4, 64), "padding": torch.zeros(1, 4, dtype=torch.bool)}
    velocity = family.denoiser.predict(
        denoiser, torch.randn(1, 16, 8, 8), torch.tensor([500]), conditioning, torch.zeros(1, 6)
    )
    assert velocity.isfinite().all()


def flux() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=12,
        pooled_projection_dim=6,
        axes_dims_rope=(2, 2, 4),
    )
    inputs = {"hidden_states": torch.randn(2, 9, 4), "encoder_hidden_states": torch.randn(2, 5, 12)}
    inputs |= {"pooled_projections": torch.randn(2, 6), "timestep": torch.tensor([0.1, 0.7])}
    return model, inputs | {"img_ids": torch.rand(9, 3), "txt_ids": torch.zeros(5, 3)}


def flux2() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from diffusers import Flux2Transformer2DModel

    sizes = {"num_layers": 1, "num_single_layers": 2, "attention_head_dim": 8, "num_attention_heads": 2}
    model = Flux2Transformer2DModel(
        in_channels=4, joint_attention_dim=12, axes_dims_rope=(2, 2, 2, 2), guidance_embeds=False, **sizes
    )
    inputs = {"hidden_states": torch.randn(2, 9, 4), "encoder_hidden_states": torch.randn(2, 5, 12)}
    inputs |= {"timestep": torch.tensor([0.1, 0.7]), "img_ids": torch.rand(9, 4), "txt_ids": torch.rand(5, 4)}
    return model, inputs


def sd3() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from diffusers import SD3Transformer2DModel

    model = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        caption_projection_dim=16,
        joint_attention_dim=12,
        pooled_projection_dim=6,
        out_channels=4,
        pos_embed_max_size=8,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )
    inputs = {"hidden_states": torch.randn(2, 4, 8, 6), "encoder_hidden_states": torch.randn(2, 5, 12)}
    return model, inputs | {"pooled_projections": torch.randn(2, 6), "timestep": torch.tensor([10, 700])}


def z_image(lengths: tuple[int, int] = (5, 5)) -> tuple[nn.Module, dict[str, object]]:
    from diffusers import ZImageTransformer2DModel

    model = ZImageTransformer2DModel(
        in_channels=4,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=12,
        axes_dims=[4, 6, 6],
        axes_lens=[128, 32, 32],
    )
    images = [torch.randn(4, 1, 8, 6) for _ in lengths]
    return model, {"x": images, "t": torch.tensor([0.1, 0.7]), "cap_feats": [torch.randn(n, 12) for n in lengths]}


def qwen_image(lengths: tuple[int, int] = (5, 5)) -> tuple[nn.Module, dict[str, object]]:
    model, longest = tiny_transformer("qwen_image"), max(lengths)
    inputs: dict[str, object] = {"hidden_states": torch.randn(2, 12, 64), "timestep": torch.tensor([0.1, 0.7])}
    inputs |= {"encoder_hidden_states": torch.randn(2, longest, 64), "img_shapes": [[(1, 4, 3)]] * 2}
    if len(set(lengths)) > 1:
        inputs["encoder_hidden_states_mask"] = torch.arange(longest) < torch.tensor(lengths)[:, None]
    return model, inputs


def qwen_image21(lengths: tuple[int, int] = (5, 5)) -> tuple[nn.Module, dict[str, object]]:
    model, longest = FAMILIES["qwen_image21"].denoiser.make(tiny_transformer("qwen_image21").config), max(lengths)
    inputs: dict[str, object] = {"hidden_states": torch.randn(2, 24, 64), "timestep": torch.tensor([0.1, 0.7])}
    inputs |= {"encoder_hidden_states": torch.randn(2, longest, 64), "img_shapes": [[(1, 6, 4)]] * 2}
    if len(set(lengths)) > 1:
        inputs["encoder_hidden_states_mask"] = torch.arange(longest) < torch.tensor(lengths)[:, None]
        inputs["img_mask"] = torch.arange(longest + 6).repeat(2, 1) >= longest
    return model, inputs


def krea2(lengths: tuple[int, int] = (5, 5)) -> tuple[nn.Module, dict[str, object]]:
    model, longest = tiny_transformer("krea2"), max(lengths)
    inputs: dict[str, object] = {"hidden_states": torch.randn(2, 12, 64), "timestep": torch.tensor([0.1, 0.7])}
    inputs |= {"encoder_hidden_states": torch.randn(2, longest, 2, 64), "position_ids": torch.rand(longest + 12, 3)}
    if len(set(lengths)) > 1:
        inputs["encoder_attention_mask"] = torch.arange(longest) < torch.tensor(lengths)[:, None]
    return model, inputs


def anima() -> tuple[nn.Module, dict[str, object]]:
    inputs: dict[str, object] = {"hidden_states": torch.randn(2, 16, 1, 8, 6), "timestep": torch.tensor([0.1, 0.7])}
    inputs |= {"encoder_hidden_states": torch.randn(2, 5, 64), "padding_mask": torch.zeros(1, 1, 8, 6)}
    cosmos_transformer()  # diffusers' code needs torchvision, or what takes its place
    return tiny_transformer("anima"), inputs


def sd15() -> tuple[nn.Module, dict[str, object]]:
    model = tiny_unet("sd15")
    text = torch.randn(2, 7, model.config.cross_attention_dim)
    return model, {"sample": torch.randn(2, 4, 8, 16), "timestep": 5, "encoder_hidden_states": text}


def attentions(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if hasattr(module, "set_processor")]


def flat(output: object) -> torch.Tensor:
    return torch.stack(output) if isinstance(output, list) else output


def gradients_of(model: nn.Module, args: dict[str, object]) -> torch.Tensor:
    model.zero_grad()
    flat(model(**args, return_dict=False)[0]).square().sum().backward()
    return torch.cat([torch.zeros(w.numel()) if w.grad is None else w.grad.flatten() for w in model.parameters()])


MODELS = {
    "sd15": sd15,
    "sd3": sd3,
    "flux": flux,
    "flux2": flux2,
    "z_image": z_image,
    "qwen_image": qwen_image,
    "qwen_image21": qwen_image21,
    "krea2": krea2,
    "anima": anima,
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_every_backend_has_the_same_values_and_gradients(make):
    torch.manual_seed(0)
    model, args = make()
    rtol, atol = (1e-4, 1e-5) if make is krea2 else (1e-9, 1e-11)  # Krea 2 computes its norms in fp32
    wide = torch.Tensor.float if make is krea2 else torch.Tensor.double
    model.to(wide(torch.zeros(1)).dtype)
    args = {
        name: wide(value) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in args.items()
    }
    lists = {name: value for name, value in args.items() if isinstance(value, list) and name != "img_shapes"}
    args |= {name: [wide(each) for each in value] for name, value in lists.items()}
    found = {}
    for name in ("sdpa", "math", "flash", "sdpa"):
        set_attention_backend(model, name)
        model.zero_grad()
        output = model(**args, return_dict=False)[0]
        out = flat(output)
        out.square().sum().backward()
        gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        found.setdefault(name, []).append((out.detach(), gradients))
    (usual, again), (written,), (pinned,) = found["sdpa"], found["math"], found["flash"]
    for one, other in ((usual, written), (usual, pinned)):
        assert all(torch.allclose(a, b, rtol=rtol, atol=atol) for a, b in zip(one, other, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(usual, again, strict=True)), "diffusers' own is back"


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_a_package_computes_every_attention(monkeypatch, make):
    model, args = make()
    usual = flat(model(**args, return_dict=False)[0])
    shapes = fake_package(monkeypatch, "xformers")
    set_attention_backend(model, "xformers")
    found = flat(model(**args, return_dict=False)[0])
    assert len(shapes) == len(attentions(model))
    assert torch.allclose(found, usual, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [z_image, qwen_image, qwen_image21, krea2])
@pytest.mark.parametrize("name", ["math", "flash", "xformers"])
def test_sequences_of_other_lengths_are_masked_with_every_backend(monkeypatch, make, name):
    """Not every backend takes a mask: torch then chooses."""
    model, args = make((5, 40))
    usual = flat(model(**args, return_dict=False)[0])
    fake_package(monkeypatch, "xformers")
    set_attention_backend(model, name)
    assert torch.allclose(flat(model(**args, return_dict=False)[0]), usual, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_of_torch_leaves_masks_to_others(name, device):
    layer = Attention(64, heads=1, dim_head=64).to(device, torch.bfloat16)
    hidden = torch.randn(2, 32, 64, device=device, dtype=torch.bfloat16)
    mask = (torch.arange(32, device=device) < 20).expand(2, 1, 32)
    usual = layer(hidden, attention_mask=mask)
    set_attention_backend(layer, name)
    found = layer(hidden, attention_mask=mask)
    found.sum().backward()
    assert torch.allclose(found, usual, atol=1e-2)
    assert layer.to_q.weight.grad.isfinite().all()


class Operators(TorchDispatchMode):
    """Counts the operators that torch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


FUSED = "_scaled_dot_product_flash_attention_for_cpu"  # what torch chooses on a CPU


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("family", ["sd15", "sd3", "flux"])
def test_recomputed_attentions_use_the_same_backend(family, mode):
    """`efficient` has no kernel for CPUs, so that its context lets torch use no fused one there."""
    torch.manual_seed(0)
    model, args = MODELS[family]()
    layers = len(attentions(model))
    expected = gradients_of(model.train(), args)
    checkpoint_blocks(model, 100, mode)
    for name in ("sdpa", "efficient", "math"):
        set_attention_backend(model, name)
        with Operators() as operators:
            found = gradients_of(model, args)
        recomputed = layers if mode == "full" else 0  # selective checkpointing keeps what attention computed
        assert operators.counts[FUSED] == (layers + recomputed if name == "sdpa" else 0)
        assert (found - expected).norm() < 1e-6 * expected.norm()


@pytest.mark.filterwarnings("ignore")  # from torch, while it compiles
@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=() if each == "flux" else pytest.mark.slow) for each in MODELS]
)
def test_blocks_compile_as_with_torchs_own_attention(monkeypatch, family):
    """Without graph breaks, in as many graphs, by its own operators. The first block is checkpointed."""
    operators = set()

    def compiled(graph: torch.fx.GraphModule, examples: object) -> Callable[..., object]:
        operators.update(getattr(node.target, "__name__", "").split(".")[0] for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    true, backend = torch.compile, aot_autograd(fw_compiler=compiled)
    monkeypatch.setattr(
        torch, "compile", lambda function, *, mode, **options: true(function, backend=backend, **options)
    )
    graphs = {}
    for name in ("sdpa", "flash", "math"):
        torch._dynamo.reset()
        operators.clear()
        torch.manual_seed(0)
        model, args = MODELS[family]()
        expected = gradients_of(model.train(), args)
        set_attention_backend(model, name)
        checkpoint_blocks(model, 1)
        before = count()
        compile_blocks(model, mode="default", dynamic=False, fullgraph=True)  # where a graph break is an error
        found = gradients_of(model, args)
        graphs[name] = count().graphs - before.graphs
        assert ("_softmax" in operators) == (name == "math")
        assert (found - expected).norm() < 1e-6 * expected.norm()
    assert graphs == dict.fromkeys(graphs, graphs["sdpa"])


def test_a_cached_signature_is_unchanged():
    class Processor:
        def __call__(self, attn, hidden_states, attention_mask=None):
            return hidden_states

    before = inspect.signature(Processor().__call__)
    cache_signature(Processor)
    assert "__signature__" in vars(Processor.__call__)
    assert inspect.signature(Processor().__call__) == before
