"""LyCORIS' own code: each layer's change in it is what this program reads and writes, with alpha unlike rank, in mixed ranks."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from lora_trainer.adapters.adapter_kinds import ADAPTERS
from lora_trainer.adapters.base import AdapterOptions
from lora_trainer.lora_format.reading import read_adapter
from lora_trainer.lora_format.weights import AdapterWeights, shapes_of
from lora_trainer.lora_format.writing import FileLayout, write_lora
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.lora_names import names_of
from tests.lora_format.tiny import facts, tiny_pipeline, tiny_transformer

lycoris = pytest.importorskip("lycoris", reason="the dev extra has it")
import lycoris.kohya as lycoris_kohya  # noqa: E402

LINEAR, KERNEL, POINT = "down_blocks.0.to_q", "mid_block.conv1", "mid_block.proj_in"
NAMES = (LINEAR, KERNEL, POINT)


def model() -> nn.Module:
    torch.manual_seed(0)
    made = nn.Module()
    made.mid_block = nn.ModuleDict({"conv1": nn.Conv2d(24, 32, 3, padding=1), "proj_in": nn.Conv2d(32, 48, 1)})
    made.down_blocks = nn.ModuleList([nn.ModuleDict({"to_q": nn.Linear(48, 32)})])
    return made.requires_grad_(False)


def by_lycoris(path: Path, prefix: str = "lycoris") -> dict[str, Tensor]:
    """Each layer's change, by LyCORIS' loader of files; it knows names behind `lycoris_` alone."""
    tensors = {key.replace(f"{prefix}_", "lycoris_", 1): each.float() for key, each in load_file(path).items()}
    base, changed = model(), model()
    network, _ = lycoris.create_lycoris_from_weights(1.0, "", changed, weights_sd=tensors)
    found = {}
    for module in network.loras:
        name = next(n for n in NAMES if module.lora_name == f"lycoris_{n.replace('.', '_')}")
        x = torch.randn(7, *((24, 5, 5) if name == KERNEL else (32, 5, 5) if name == POINT else (48,)))
        module.apply_to()
        found[name] = (x, changed.get_submodule(name)(x) - base.get_submodule(name)(x))
    return found


def change(weights: AdapterWeights, name: str, x: Tensor) -> Tensor:
    """What the update does to a layer's output."""
    layer = model().get_submodule(name)
    before = layer(x)
    weight = layer.weight.data
    layer.weight.data = weight + weights.modules[f"unet.{name}"].delta(weight).reshape(weight.shape)
    return layer(x) - before


@pytest.mark.parametrize("rank", [3, 16, 40])
@pytest.mark.parametrize("kind", ["lora", "dora", "lokr", "loha", "oft"])
def test_what_is_written_is_the_change_there(kind: str, rank: int, tmp_path: Path):
    """Of rank 40 both factors of a LoKr are whole, where LyCORIS does not count alpha."""
    parameters = ADAPTERS[kind].load().inject(changed := model(), NAMES, AdapterOptions(rank, 5.0), 1)
    for parameter in parameters.values():
        parameter.data += 0.05 * torch.randn_like(parameter)
    values = {name: each.detach() for name, each in parameters.items()}
    weights = AdapterWeights(ADAPTERS[kind].load().updates(values, "unet", AdapterOptions(rank, 5.0)))
    layout = FileLayout(torch.float32, shapes_of({"unet": model()}), forms=ADAPTERS[kind].load().forms)
    kohya, _ = write_lora(tmp_path, "cat", weights, facts(), layout)
    found = by_lycoris(kohya, "lora_unet")
    assert set(found) == set(NAMES)
    for name, (x, theirs) in found.items():
        trained = changed.get_submodule(name)(x) - model().get_submodule(name)(x)
        assert float((theirs - trained).detach().norm() / trained.detach().norm()) < 1e-4, name


ENDINGS = ("attn1.to_q", "attn2.to_v", "conv1", "conv_shortcut", "proj_in", "add_k_proj", "proj_mlp", "attn.to_q")


@pytest.mark.parametrize("kind", ["lora", "dora", "lokr", "loha", "oft"])
@pytest.mark.parametrize("family", ["sd15", "sdxl", "flux"])
def test_a_whole_file_is_loaded_there_by_the_names_of_the_family(family: str, kind: str, tmp_path: Path, monkeypatch):
    """U-Nets by its loader for kohya's names, transformers by its own names, in which only a LoRA has fused layers."""
    if (family, kind) == ("flux", "lora"):
        pytest.skip("kohya's names of FLUX.1 are those of the original code, whose layers are no layers of diffusers'")
    is_unet = family != "flux"
    trained, plain = (
        (tiny_pipeline(tmp_path / name, family).unet if is_unet else tiny_transformer(family)).requires_grad_(False)
        for name in ("one", "two")
    )
    plain.load_state_dict(trained.state_dict())
    component, shapes = FAMILIES[family].denoiser.component, shapes_of({FAMILIES[family].denoiser.component: plain})
    names = [name.partition(".")[2] for name in shapes if name.endswith(ENDINGS)]
    adapter, options = ADAPTERS[kind].load(), AdapterOptions(4, 6.0)
    parameters = adapter.inject(trained, names, options, 1)
    torch.manual_seed(1)
    for parameter in parameters.values():
        parameter.data += 0.05 * torch.randn_like(parameter)
    values = {name: each.detach() for name, each in parameters.items()}
    weights = AdapterWeights(adapter.updates(values, component, options))
    layout = FileLayout(shapes=shapes, names=names_of(FAMILIES[family]), forms=adapter.forms)  # in the default type
    file, _ = write_lora(tmp_path, "cat", weights, facts(), layout)
    if is_unet:
        # Of diffusers' U-Nets 4.1.3 lists the time embedding twice, by its class and by its name, and refuses it then.
        monkeypatch.setattr(lycoris_kohya.LycorisNetworkKohya, "UNET_TARGET_REPLACE_NAME", [])
        network, _ = lycoris_kohya.create_network_from_weights(1.0, str(file), None, None, plain)
        loaded = network.unet_loras
    else:
        network, _ = lycoris.create_lycoris_from_weights(1.0, "", plain, weights_sd=load_file(file))
        loaded = network.loras
    assert len(loaded) == len(names) > 5
    inputs = {name: torch.randn(2, *input_shape(plain.get_submodule(name))) for name in names}
    before = {name: plain.get_submodule(name)(x) for name, x in inputs.items()}
    network.float()  # as for a model in fp32
    changes, unchanged = read_adapter(file, [names_of(FAMILIES[family])]).modules, copy.deepcopy(plain)
    for module in loaded:
        module.apply_to()
    for name, x in inputs.items():
        layer = unchanged.get_submodule(name)
        layer.weight.data = layer.weight + changes[f"{component}.{name}"].delta(layer.weight).reshape(
            layer.weight.shape
        )
        theirs, ours = (each.get_submodule(name)(x) - before[name] for each in (plain, unchanged))
        assert float((theirs - ours).detach().norm() / ours.detach().norm()) < 1e-4, name


def input_shape(layer: nn.Module) -> tuple[int, ...]:
    if isinstance(layer, nn.Conv2d):
        return (layer.in_channels, 5, 5)
    assert isinstance(layer, nn.Linear)
    return (layer.in_features,)
