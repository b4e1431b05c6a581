"""Finds device errors without a GPU: operations that mix CPU and GPU tensors.

Meta tensors simulate those on a GPU; CPU tensors are real. So code that reads a number from the GPU, or forgets to
move a tensor there, is found, through autograd too. Not covered: streams, events and pinned memory; the attention
probe and the check of compiled blocks, which compare numbers; torch's fused AdamW and the fp16 scaler, which need
real devices; 4-bit and 8-bit GPU kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lora_trainer.config.schema import Config, Precision
from lora_trainer.data.loader import Batch
from lora_trainer.data.steps import Ref
from lora_trainer.evaluation.compute import Compute
from lora_trainer.evaluation.drift import base_visits, drift
from lora_trainer.evaluation.placing import bring_pipeline
from lora_trainer.evaluation.validation_loss import EncodedSample, validation_losses
from lora_trainer.models.attention.backends import set_attention_backend
from lora_trainer.models.attention.choose import AttentionChoice
from lora_trainer.models.attention.shapes import shapes_of
from lora_trainer.models.drawing import prompted, read_prompts
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.quantization.layers import place_layers
from lora_trainer.models.quantization.store import Narrow
from lora_trainer.training import build
from lora_trainer.training.denoiser_layout import Layout
from lora_trainer.training.micro_batch import make_micro_batch
from lora_trainer.training.processes import Processes
from lora_trainer.training.step import StepSettings, train_step
from tests.families.own import own_families
from tests.recipes.recipe import save_tiny_model

GPU, CPU, BF16 = torch.device("meta"), torch.device("cpu"), torch.bfloat16
Kind = tuple[Any, Path, Precision, tuple[float, ...]]
# The family, its weight dtype, and the learning rates of its text encoders: T5 is cached for SD3 and trained for FLUX.1.
KINDS: dict[str, tuple[str, Precision, tuple[float, ...]]] = {
    "sd15": ("sd15", "bf16", (1e-4,)),
    "sdxl": ("sdxl", "int8", ()),
    "sd3": ("sd3", "bf16", (1e-4, 1e-4)),
    "sd3.5": ("sd3", "int8", ()),
    "flux": ("flux", "bf16", (1e-4, 1e-4)),
    "flux-schnell": ("flux", "fp8", ()),
    "flux2": ("flux2", "fp8", ()),
    "chroma": ("chroma", "bf16", ()),
    "z_image": ("z_image", "fp8", ()),
    "qwen_image": ("qwen_image", "int8", ()),
    "qwen_image21": ("qwen_image21", "bf16", ()),
    "krea2": ("krea2", "bf16", ()),
    "anima": ("anima", "bf16", ()),
    **{name: (name, "bf16", ()) for name in own_families()},
}
ALIKE = ("sdxl", "sd3.5", "flux-schnell")  # sampled like the other flavor
CAPTIONS = ("a ring", (("a red", 1.0), (" ring", 1.3)))
CROSSING = ("copy_", "_to_copy", "_foreach_copy_")
INDEXED = ("index", "index_put", "index_put_", "_unsafe_index", "_index_put_impl_")  # by scalars of either device
SAME_TYPE = ("mm", "addmm", "bmm", "baddbmm", "convolution", "linear", "_scaled_dot_product", "embedding_renorm")

SUMS_BESIDE = ("attention_backward", "attention_for_cpu_backward")  # fused: they get their sums in fp32


class FakeGpu(TorchDispatchMode):
    """Refuses what a GPU refuses: tensors of both devices in one operation, and matmuls of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []  # what would wait for a GPU

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function.overloadpacket.__name__
        met = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        here = args[:1] if name in INDEXED else met
        places = {leaf.device for leaf in tree_leaves(here) if isinstance(leaf, Tensor) and leaf.ndim}
        if name not in CROSSING and (len(places) > 1 or (GPU in {leaf.device for leaf in met} and places - {GPU})):
            raise RuntimeError(f"{function}: tensors on the GPU and beside the CPU")
        kinds = {leaf.dtype for leaf in met if leaf.is_floating_point() and leaf.ndim > 1}
        if name.startswith(SAME_TYPE) and not name.endswith(SUMS_BESIDE) and len(kinds) > 1:
            raise RuntimeError(f"{function}: {kinds}")
        if name == "_local_scalar_dense" and args[0].device == GPU:
            self.reads.append(name)
            return 1.0 if args[0].is_floating_point() else int(args[0].dtype == torch.bool)
        if name == "nonzero" and args[0].device == GPU:
            self.reads.append(name)
            return torch.zeros(1, args[0].ndim, dtype=torch.long, device=GPU)
        if name == "_to_copy" and args[0].device == GPU and kwargs.get("device") == CPU:
            self.reads.append(name)
            return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        return function(*args, **kwargs)


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    name, *rest = KINDS[request.param]
    family = FAMILIES[name]

    def load(folder: Path, dtype: torch.dtype, device: torch.device, narrow: Narrow | None = None) -> nn.Module:
        return place_layers(family.denoiser.load(folder, dtype, CPU), device, narrow)  # scales need numbers

    family_on_gpu = replace(family, denoiser=replace(family.denoiser, load=load))
    return family_on_gpu, save_tiny_model(tmp_path_factory.mktemp("model"), request.param), *rest


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    def put(denoiser: nn.Module, config: Config, family: Any, layout: Layout, *_: Any, **__: Any) -> AttentionChoice:
        shapes_of(
            denoiser,
            family.denoiser.predict,
            layout.latents,
            family.text.cond_shapes(dict(denoiser.config)),
            layout.dtype,
        )  # type: ignore[arg-type]
        set_attention_backend(denoiser, "sdpa")
        return AttentionChoice("sdpa", "its probe compares numbers")

    monkeypatch.setattr(build, "set_up_attention", put)
    with FakeGpu() as mode:
        yield mode


def settings(**sections: Any) -> Config:
    return Config.model_validate({"optimizer": {"name": "lion"}, "lora": {"rank": 2}, **sections})


def text_embeddings_of(family: Any, model: Path) -> dict[str, Tensor]:
    """The text embeddings of encoders on the GPU, as the caches return them: on the CPU."""
    embeds = family.load_encoders(model, BF16, GPU).encode_text(CAPTIONS)
    assert {value.device for value in embeds.values()} == {GPU}
    return {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in embeds.items()}


def a_batch(family: Any, facts: Any, cond: dict[str, Tensor]) -> Batch:
    """Two samples as the caches return them."""
    latents = torch.randn(2, facts.latent_channels, 8, 8)
    refs = tuple(Ref(index, name, 0, 0) for index, name in enumerate("ab"))
    mask = torch.rand(2, 1, 8, 8)
    return Batch(refs, latents, latents.abs(), cond, torch.full((2, 6), 64.0), torch.ones(2), mask, CAPTIONS)


def test_a_step_mixes_no_devices(gpu: FakeGpu, kind: Kind) -> None:
    """Loading, LoRA, every kind of noise, masks, loss, checkpointed backward, clipping and update."""
    family, model, stored, rates = kind
    facts = family.describe(model)
    flow = facts.prediction == "flow"
    noise = {"multires_iterations": 3, "offset": 0.1, "input_perturbation": 0.1}
    loss = {"type": "huber"} if flow else {"min_snr_gamma": 5.0}
    config = settings(noise=noise, loss=loss, text_encoder={"learning_rates": rates})
    layout = Layout(BF16, stored, checkpointing=1, latents=(2, facts.latent_channels, 8, 8))
    processes = Processes(0, 1, GPU, None, lambda: None)
    context = build.build_step_context(config, family, facts, layout, processes, is_attention_requested=False)
    batch = a_batch(family, facts, text_embeddings_of(family, model))
    micro = make_micro_batch(batch, 0, 0, config.noise, context.process)
    gpu.reads.clear()
    result = train_step(context, [micro], 2, StepSettings(1e-4))
    assert gpu.reads == []
    assert result.loss.device == result.grad_norm.device == GPU
    assert len(context.optimizer.state) == len(context.masters)


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=pytest.mark.slow) if k in ALIKE else k for k in KINDS], indirect=True
)
@pytest.mark.usefixtures("gpu")
def test_sampling_and_evaluation_mix_no_devices(kind: Kind) -> None:
    """The VAE with its scale and shift, validation loss, drift of the base model, and the sampling loop."""
    family, model, *_ = kind
    mean, spread = family.load_encoders(model, BF16, GPU).encode_image(torch.zeros(2, 3, 64, 64))
    assert mean.device == spread.device == GPU
    pipeline = family.pipeline.make(model, BF16, CPU)
    bring_pipeline(pipeline, family, GPU, None, (64, 64))
    denoiser, process = getattr(pipeline, family.denoiser.component), family.denoiser.make_process(model)

    def predict(*args: Any) -> Tensor:
        return family.denoiser.predict(denoiser, *args)

    cond = text_embeddings_of(family, model)
    own = {name: value[0] for name, value in cond.items()}
    one = EncodedSample("a", torch.zeros(mean.shape[1:]), own, torch.ones(6))
    validation_losses(predict, [one], process, seed=0, timesteps=1, compute=Compute(BF16, GPU))
    there, sizes = {name: value.to(GPU, BF16) for name, value in cond.items()}, torch.ones(2, 6, device=GPU)
    visits = base_visits(predict, process, there, sizes, tuple(mean.shape[1:]), steps=2)
    assert drift(predict, visits[:1], there, sizes) >= 0.0
    with torch.no_grad():
        read = read_prompts(pipeline, family, ["a ring", "blue"])
        prompts = prompted(
            family, read, ["a ring"], "blue" if family.pipeline.sampling_defaults(model).negative else None
        )
        drawn = pipeline(
            **prompts,
            generator=[torch.Generator("cpu").manual_seed(1)],
            num_inference_steps=2,
            **{family.pipeline.guidance: 4.0},
            width=64,
            height=64,
            output_type="pt",
        ).images
    assert drawn.device == GPU
