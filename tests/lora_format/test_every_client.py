"""Every row of docs/clients.md in the default type: what diffusers and ComfyUI compute of both files of each family and kind.

diffusers' own code loads the files and runs the denoiser once. ComfyUI is not installed: each layer's change is computed from
the raw tensors by its formulas, which `test_comfyui.py` compares with its results.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from lora_trainer.adapters.adapter_kinds import ADAPTERS
from lora_trainer.adapters.base import AdapterOptions
from lora_trainer.adapters.target_modules import target_modules
from lora_trainer.lora_format.keys import resolve
from lora_trainer.lora_format.kinds.dora import DecomposedUpdate
from lora_trainer.lora_format.weights import AdapterWeights, adaptable_modules, shapes_of
from lora_trainer.lora_format.writing import FileLayout, write_lora
from lora_trainer.models.drawing import prompted, read_prompts
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.lora_clients import clients
from lora_trainer.models.lora_names import inspect_lora, names_of, read_adapter
from tests.lora_format.tiny import facts
from tests.recipes.recipe import save_tiny_model

CPU = torch.device("cpu")
TEXT_LAYERS = ("q_proj", "out_proj", "fc1")
OPTIONS = AdapterOptions(4, 6.0)
LOADS_A_LOKR = ("flux2", "z_image")
# Of these diffusers converts kohya's names with the published model's widths, which a tiny one does not have.
OF_PUBLISHED_WIDTHS = ("flux", "chroma")


@dataclass
class Bench:
    """A family's tiny pipeline, and the inputs of one call of its denoiser."""

    family: str
    folder: Path
    pipeline: Any
    arguments: tuple[Any, ...]
    named: dict[str, Any]

    @property
    def component(self) -> str:
        return FAMILIES[self.family].denoiser.component

    @property
    def parts(self) -> dict[str, nn.Module]:
        """What a LoRA may be on: the denoiser, and CLIP. T5 is passed over by diffusers (docs/text.md)."""
        texts = {name: getattr(self.pipeline, name) for name in FAMILIES[self.family].text.targets}
        clips = {name: part for name, part in texts.items() if "CLIP" in type(part).__name__}
        return {self.component: getattr(self.pipeline, self.component), **clips}

    @torch.no_grad()
    def predict(self) -> Tensor:
        found = getattr(self.pipeline, self.component)(*self.arguments, **self.named)
        sample = found[0] if isinstance(found, tuple) else found.sample
        return torch.cat([each.flatten() for each in sample]) if isinstance(sample, list) else sample


SLOW = pytest.mark.slow
FAST = ("sd15", "flux2")  # with text encoders, and the one whose magnitudes diffusers renames


@pytest.fixture(scope="module", params=[pytest.param(name, marks=() if name in FAST else SLOW) for name in FAMILIES])
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("clients") / request.param
    folder.mkdir()
    family = FAMILIES[request.param]
    pipeline = family.pipeline.make(save_tiny_model(folder, request.param), torch.float32, CPU)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    denoiser = getattr(pipeline, family.denoiser.component)
    hook = denoiser.register_forward_pre_hook(
        lambda module, arguments, named: calls.append((arguments, named)), with_kwargs=True
    )
    texts: dict[str, Any] = {"prompt": "a ring"}
    if request.param == "qwen_image21":  # whose pipeline's own reading needs torchvision
        texts = prompted(family, read_prompts(pipeline, family, ["a ring"]), ["a ring"], None)
    pipeline(**texts, num_inference_steps=2, width=64, height=64, output_type="pt")
    hook.remove()
    return Bench(request.param, folder, pipeline, *calls[0])


def files(bench: Bench, kind: str) -> tuple[Path, Path]:
    """Both files of a kind on all layers of `attention+ff` and of the text encoders, as a run writes them."""
    adapter, updates = ADAPTERS[kind].load(), {}
    torch.manual_seed(1)
    for component, part in bench.parts.items():
        trained = copy.deepcopy(part)
        trained.requires_grad_(False)
        if component == bench.component:
            layers = target_modules(trained, FAMILIES[bench.family].denoiser, "attention+ff")
        else:
            layers = [name for name, each in trained.named_modules() if name.endswith(TEXT_LAYERS)]
        parameters = adapter.inject(trained, layers, OPTIONS, 1)
        values = {name: each.detach() + 0.05 * torch.randn_like(each) for name, each in parameters.items()}
        updates |= adapter.updates(values, component, OPTIONS)
    layout = FileLayout(shapes=shapes_of(bench.parts), names=names_of(FAMILIES[bench.family]), forms=adapter.forms)
    version, architecture = FAMILIES[bench.family].lora_files.base_names(
        FAMILIES[bench.family].describe(bench.folder / "model")
    )
    about = facts(base_version=version, architecture=architecture)
    return write_lora(bench.folder, kind, AdapterWeights(updates), about, layout)


def with_changes(bench: Bench, weights: AdapterWeights, run: Callable[[], Tensor]) -> Tensor:
    """What a function returns while the layers have their changes."""
    layers = adaptable_modules(bench.parts)
    before = {name: layers[name].weight.data for name in weights.modules}
    for name, update in weights.modules.items():
        layers[name].weight.data = before[name] + update.delta(before[name]).reshape(before[name].shape)
    try:
        return run()
    finally:
        for name, weight in before.items():
            layers[name].weight.data = weight


@torch.no_grad()
def outputs(bench: Bench) -> Tensor:
    """The denoiser's prediction, and what each layer of a text encoder makes of random numbers."""
    numbers = torch.Generator().manual_seed(3)
    found = [bench.predict().flatten()]
    for component, part in bench.parts.items():
        if component == bench.component:
            continue
        for name, layer in part.named_modules():
            if name.endswith(TEXT_LAYERS):
                found.append(layer(torch.randn(2, layer.in_features, generator=numbers)).flatten())
    return torch.cat(found)


def load(bench: Bench, file: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bench.pipeline.load_lora_weights(str(file.parent), weight_name=file.name)


KINDS = [pytest.param(kind, marks=() if kind in ("lora", "dora") else SLOW) for kind in ADAPTERS]


@pytest.mark.parametrize("kind", KINDS)
def test_diffusers_computes_what_is_written(bench: Bench, kind: str) -> None:
    """A file that `inspect` calls whole changes the prediction as the program reads it; of its own names others raise."""
    kohya, diffusers = files(bench, kind)
    plain = outputs(bench)
    for file in (kohya, diffusers):
        claim = next(each for each in clients(inspect_lora(file)) if each.name == "diffusers")
        if file == diffusers:
            assert (claim.reads == "whole") == (
                kind in ("lora", "dora") or (kind == "lokr" and bench.family in LOADS_A_LOKR)
            )
        elif claim.reads != "whole" or bench.family in OF_PUBLISHED_WIDTHS:
            continue
        try:
            if claim.reads != "whole":
                with pytest.raises(ValueError):  # noqa: PT011 (whichever of its own it raises)
                    load(bench, file)
                continue
            load(bench, file)
            theirs = outputs(bench)
        finally:
            bench.pipeline.unload_lora_weights()
        ours = with_changes(bench, read_adapter(file), lambda: outputs(bench))
        assert float((ours - plain).norm()) > 1e-3 * float(plain.norm())
        assert float((theirs - ours).norm() / (ours - plain).norm()) < 2e-3, file.name


def by_comfyui(parts: Mapping[str, Tensor], weight: Tensor) -> Tensor:
    """A layer's change at strength 1 by ComfyUI's formulas, in fp32."""
    wide = {end: each.float() for end, each in parts.items()}
    alpha = wide.get("alpha")
    if "lora_up.weight" in wide:
        down, up = wide["lora_down.weight"], wide["lora_up.weight"]
        scale = 1.0 if alpha is None else float(alpha) / len(down)
        change = (up.flatten(1) @ down.flatten(1)).reshape(len(up), *down.shape[1:]) * scale
    elif "hada_w1_a" in wide:
        scale = 1.0 if alpha is None else float(alpha) / len(wide["hada_w1_b"])
        change = (wide["hada_w1_a"] @ wide["hada_w1_b"]) * (wide["hada_w2_a"] @ wide["hada_w2_b"]) * scale
    elif "oft_blocks" in wide:
        skew = wide["oft_blocks"] - wide["oft_blocks"].transpose(1, 2)
        identity = torch.eye(skew.shape[1])
        turned = (identity + skew) @ torch.linalg.inv(identity - skew)
        rows = weight.reshape(len(skew), skew.shape[1], -1)
        change = (torch.einsum("knm,kn...->km...", turned, rows) - rows).reshape(weight.shape)
    else:
        two = wide["lokr_w2"] if "lokr_w2" in wide else wide["lokr_w2_a"] @ wide["lokr_w2_b"].flatten(1)
        scale = float(alpha) / len(wide["lokr_w2_b"]) if alpha is not None and "lokr_w2_b" in wide else 1.0
        change = torch.kron(wide["lokr_w1"], two.flatten(1)) * scale
    return change.reshape(weight.shape)


@pytest.mark.parametrize("kind", KINDS)
def test_comfyuis_formulas_give_what_is_written(bench: Bench, kind: str) -> None:
    """From the raw tensors. A DoRA's magnitudes are left out: ComfyUI divides by another norm (docs/clients.md)."""
    file, _ = files(bench, kind)
    raw: dict[str, dict[str, Tensor]] = {}
    for key, tensor in load_file(file).items():
        name, _, end = key.partition(".")
        raw.setdefault(name, {})[end] = tensor
    found, _ = resolve(raw, [names_of(FAMILIES[bench.family])])
    ours, layers = read_adapter(file).modules, adaptable_modules(bench.parts)
    assert sum(len(set(place.modules) & set(ours)) for place in found.values()) == len(ours) > 5
    for name, parts in raw.items():
        place = found[name]
        weights = [layers[module].weight.detach() for module in place.modules]
        wanted = []
        for module, weight in zip(place.modules, weights, strict=True):
            update = ours.get(module)
            update = update.change if isinstance(update, DecomposedUpdate) else update
            wanted.append(torch.zeros(weight.shape) if update is None else update.delta(weight).reshape(weight.shape))
        theirs = by_comfyui(parts, torch.cat(weights))
        assert float((theirs - torch.cat(wanted)).norm() / theirs.norm()) < 1e-4, name
