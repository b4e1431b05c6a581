"""DoRA, LoKr, LoHa and OFT in the tools for files: as a plain LoRA, merged into a base model, or refused with the fix."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lora_trainer.adapters.adapter_kinds import ADAPTERS
from lora_trainer.adapters.base import AdapterOptions
from lora_trainer.cli.main import main
from lora_trainer.lora_format.kinds.dora import DecomposedUpdate
from lora_trainer.lora_format.kinds.lora import LoraPair
from lora_trainer.lora_format.layer_updates import to_lora
from lora_trainer.lora_format.weights import AdapterWeights, adaptable_modules, shapes_of
from lora_trainer.lora_format.writing import FileLayout, write_lora
from lora_trainer.lora_tools.base_layers import read_base
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.lora_names import names_of, read_adapter, read_lora
from lora_trainer.models.quantization.stored_forms import WeightReader
from tests.lora_format.tiny import facts
from tests.models.single.originals import flow_checkpoint, unet_checkpoint, write
from tests.models.single.tiny import tiny_flow_pipeline, tiny_pipeline

OTHERS = sorted(set(ADAPTERS) - {"lora"})
BY_BASE = ("dora", "oft")  # their changes depend on the base model's weights
UNET = ("attn1.to_q", "attn2.to_v", "conv1", "conv_shortcut", "proj_in", "time_emb_proj", "downsamplers.0.conv")
FLUX = ("to_q", "to_v", "add_k_proj", "norm1.linear", "norm_out.linear", "proj_mlp")
OPTIONS = AdapterOptions(4, 6.0)


def names_in(model: nn.Module, endings: Sequence[str]) -> list[str]:
    kinds = nn.Linear | nn.Conv2d
    return [name for name, each in model.named_modules() if isinstance(each, kinds) and name.endswith(tuple(endings))]


def prediction(unet: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    x, text = torch.randn(2, 4, 16, 16, generator=generator), torch.randn(2, 7, 64, generator=generator)
    result: Tensor = unet(x, torch.tensor([10, 700]), text).sample
    return result


def trained(kind: str, unet: nn.Module, steps: int = 4) -> AdapterWeights:
    """A few steps of an adapter on the U-Net, which keeps it."""
    adapter = ADAPTERS[kind].load()
    parameters = adapter.inject(unet.requires_grad_(False), names_in(unet, UNET), OPTIONS, 1)
    optimizer = torch.optim.AdamW(parameters.values(), 2e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        (prediction(unet) - 1).square().mean().backward()
        optimizer.step()
    values = {name: parameter.detach() for name, parameter in parameters.items()}
    return AdapterWeights(adapter.updates(values, "unet", OPTIONS))


def written(folder: Path, kind: str, weights: AdapterWeights, model: nn.Module, family: str) -> Path:
    component = FAMILIES[family].denoiser.component
    names = names_of(FAMILIES[family])
    layout = FileLayout(torch.float32, shapes_of({component: model}), names, ADAPTERS[kind].load().forms)
    version = {"sd15": "sd_v1", "flux": "flux1"}[family]
    return write_lora(folder, kind, weights, facts(base_version=version, architecture="a/lora"), layout)[0]


def gap(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Saved as `base` and `base.safetensors`, with its folder."""
    folder = tmp_path_factory.mktemp("kinds")
    made = tiny_pipeline(folder / "words", "sd15")
    made.save_pretrained(folder / "base")
    write(unet_checkpoint(made, "sd15"), folder / "base.safetensors")
    made.folder = folder
    return made


def base_unet(pipeline: Any) -> UNet2DConditionModel:
    unet: UNet2DConditionModel = UNet2DConditionModel.from_pretrained(pipeline.folder / "base" / "unet").eval()
    return unet


@pytest.mark.parametrize("kind", OTHERS)
def test_a_merged_base_predicts_what_the_trained_model_does(kind, pipeline, tmp_path, capsys):
    unet = base_unet(pipeline)
    before = prediction(unet).detach()
    weights = trained(kind, unet)
    after = prediction(unet).detach()
    assert gap(after, before) > 1e-3
    file = written(tmp_path, kind, weights, base_unet(pipeline), "sd15")
    merged = tmp_path / "merged"
    command = ["merge", str(file), "--into", str(pipeline.folder / "base"), "--output", str(merged)]
    assert main(command) == 0, capsys.readouterr().err
    found = UNet2DConditionModel.from_pretrained(merged / "unet").eval()
    assert gap(prediction(found).detach(), after) < 1e-4 * gap(after, before)


@pytest.mark.parametrize("kind", BY_BASE)
def test_the_weights_of_fused_layers_are_those_of_the_original_layout(kind, tmp_path, capsys):
    """to_q is some rows of a fused layer of FLUX.1's file, and the last norm's halves change places there."""
    pipeline = tiny_flow_pipeline(tmp_path / "words", "flux-dev")
    base, merged = write(flow_checkpoint(pipeline), tmp_path / "base.safetensors"), tmp_path / "merged.safetensors"
    model, options = pipeline.transformer, AdapterOptions(4, 4.0)
    layers = {name: each.weight.detach().clone() for name, each in adaptable_modules({"transformer": model}).items()}
    shapes = shapes_of({"transformer": model})
    parameters = ADAPTERS[kind].load().inject(model, names_in(model, FLUX), options, 1)
    generator = torch.Generator().manual_seed(3)
    values = {
        name: each.detach() + 0.05 * torch.randn(each.shape, generator=generator) for name, each in parameters.items()
    }
    weights = AdapterWeights(ADAPTERS[kind].load().updates(values, "transformer", options))
    layout = FileLayout(torch.float32, shapes, names_of(FAMILIES["flux"]), ADAPTERS[kind].load().forms)
    file, _ = write_lora(tmp_path, "cat", weights, facts(base_version="flux1", architecture="a/lora"), layout)
    assert main(["merge", str(file), "--into", str(base), "--output", str(merged)]) == 0, capsys.readouterr().err
    with ExitStack() as stack:
        reader = WeightReader(read_base(merged, "--model").weights, stack, torch.device("cpu"), copy=True)
        for name, update in weights.modules.items():
            change = reader.read(name, torch.float32).reshape(layers[name].shape) - layers[name]
            assert gap(change, update.delta(layers[name]).reshape(change.shape)) < 1e-3, name


@pytest.mark.parametrize("kind", OTHERS)
def test_a_plain_lora_of_any_kind_has_its_change_or_the_printed_error(kind, pipeline, tmp_path, capsys):
    unet = base_unet(pipeline)
    layers = {name: each.weight.detach().clone() for name, each in adaptable_modules({"unet": unet}).items()}
    weights = trained(kind, unet)
    file, out = written(tmp_path, kind, weights, base_unet(pipeline), "sd15"), tmp_path / "out.safetensors"
    command = ["convert", str(file), str(out), "--to", "lora", "--overwrite", "--dtype"]
    base = ["--model", str(pipeline.folder / "base.safetensors")] if kind in BY_BASE else []
    if base:
        assert main([*command, "fp32", "--rank", "4"]) == 2
        assert "Name the base model: --model BASE" in " ".join(capsys.readouterr().err.split())
    exact = {name: each.delta(layers[name]).reshape(layers[name].shape) for name, each in weights.modules.items()}
    size = float(torch.cat([each.flatten() for each in exact.values()]).norm())
    best = {name: torch.linalg.svdvals(each.flatten(1))[2:].norm() for name, each in exact.items()}
    for rank, dtype in ((4096, "fp32"), (4096, "bf16"), (2, "fp16")):
        assert main([*command, dtype, "--rank", str(rank), *base]) == 0, capsys.readouterr().err
        found = read_lora(out).modules
        assert {name: pair.delta().shape for name, pair in found.items()} == {
            name: each.shape for name, each in exact.items()
        }
        printed = re.findall(r"error (?:under )?([\d.]+)%", capsys.readouterr().err)
        whole, worst = (float(each) / 100 for each in printed)
        errors = {name: float((found[name].delta() - each).norm()) for name, each in exact.items()}
        shares = {name: each / float(exact[name].norm()) for name, each in errors.items()}
        # Of the file as it was written, rounded: 0.2 % in bf16, where nothing else is lost.
        assert whole == pytest.approx(
            sum(each**2 for each in errors.values()) ** 0.5 / size, abs=6e-4 if rank == 2 else 1.1e-5
        )
        assert worst == pytest.approx(max(shares.values()), abs=6e-4 if rank == 2 else 1.1e-5)
        if rank == 4096:
            assert max(shares.values()) < (1e-4 if dtype == "fp32" else 4e-3)
            assert dtype == "fp32" or worst > 1e-3
        else:
            assert {pair.rank for pair in found.values()} <= {1, 2}
            assert all(errors[name] <= float(best[name]) * 1.01 + 2e-3 * float(exact[name].norm()) for name in exact)


def test_tools_of_low_rank_pairs_name_the_command_that_makes_them_and_take_its_result(pipeline, tmp_path, capsys):
    weights = trained("lokr", base_unet(pipeline), 1)
    kronecker = str(written(tmp_path, "lokr", weights, base_unet(pipeline), "sd15"))
    pairs = {
        name: LoraPair(torch.ones(1, *shape[1:]), torch.ones(shape[0], 1, *[1] * (len(shape) - 2)), 1.0)
        for name, shape in shapes_of({"unet": base_unet(pipeline)}).items()
        if name in weights.modules
    }
    layout = FileLayout(torch.float32, names=names_of(FAMILIES["sd15"]))
    lora, out = (
        str(write_lora(tmp_path, "cat", AdapterWeights(pairs), facts(), layout)[0]),
        str(tmp_path / "o.safetensors"),
    )
    tools = (
        ["merge", lora, "{}", "--output", out],
        ["resize", "{}", "--rank", "2", "--output", out],
        ["average", lora, "{}", "--output", out],
        ["convert", "{}", out, "--to", "diffusers"],
    )
    plain = str(tmp_path / "plain.safetensors")
    assert main(["convert", kronecker, plain, "--to", "lora", "--rank", "4"]) == 0, capsys.readouterr().err
    capsys.readouterr()
    for tool in tools:
        assert main([word.format(kronecker) for word in tool]) == 2, tool
        error = " ".join(capsys.readouterr().err.split())
        assert "lokr.safetensors is LoKr, not a plain LoRA" in error
        assert "convert IN OUT --to lora --rank N" in error
        assert main([word.format(plain) for word in tool]) == 0, capsys.readouterr().err
        Path(out).unlink()
        capsys.readouterr()


def test_a_file_with_a_kind_for_each_layer_is_converted_merged_or_refused_once(pipeline, tmp_path, capsys):
    tensors = {
        f"lora_unet_mid_block_attentions_0_proj_in.{end}": torch.randn(shape) * 0.1
        for end, shape in (("lora_down.weight", (2, 64, 1, 1)), ("lora_up.weight", (64, 2, 1, 1)))
    } | {
        f"lora_unet_mid_block_attentions_0_transformer_blocks_0_attn1_to_q.{end}": torch.randn(8, 8) * 0.3
        for end in ("lokr_w1", "lokr_w2")
    }  # fmt: skip
    mixed, out = tmp_path / "mixed.safetensors", tmp_path / "out.safetensors"
    save_file(tensors, mixed, metadata={"ss_base_model_version": "sd_v1"})
    for tool in (
        ["resize", str(mixed), "--rank", "1"],
        ["merge", str(mixed), str(mixed)],
        ["average", str(mixed), str(mixed)],
    ):
        assert main([*tool, "--output", str(out)]) == 2
        error = " ".join(capsys.readouterr().err.split())
        assert "mixed.safetensors is LoKr and LoRA, not a plain LoRA" in error
        assert "convert IN OUT --to lora --rank N" in error
    base = str(pipeline.folder / "base.safetensors")
    assert main(["convert", str(mixed), str(out), "--to", "lora", "--rank", "64", "--dtype", "fp32"]) == 0
    exact, found = read_adapter(mixed).modules, read_lora(out).modules
    assert found.keys() == exact.keys()
    assert all(gap(found[name].delta().flatten(), each.delta().flatten()) < 1e-4 for name, each in exact.items())
    capsys.readouterr()
    assert main(["merge", str(mixed), "--into", base, "--output", str(tmp_path / "merged.safetensors")]) == 0
    extracted = tmp_path / "back.safetensors"
    merged = [base, str(tmp_path / "merged.safetensors")]
    assert main(["extract", *merged, "--rank", "64", "--dtype", "fp32", "--output", str(extracted)]) == 0
    back = read_lora(extracted).modules
    assert back.keys() == exact.keys()
    assert all(gap(back[name].delta().flatten(), each.delta().flatten()) < 1e-4 for name, each in exact.items())


def test_models_of_two_families_or_sizes_are_refused_by_name(pipeline, tmp_path, capsys):
    other, wide = tmp_path / "other.safetensors", tmp_path / "wide.safetensors"
    write(unet_checkpoint(tiny_pipeline(tmp_path / "words", "sdxl"), "sdxl"), other)
    tensors = load_file(pipeline.folder / "base.safetensors")
    key = "model.diffusion_model.input_blocks.1.1.transformer_blocks.0.attn1.to_q.weight"
    write(tensors | {key: torch.randn(64, tensors[key].shape[1])}, wide)
    for tuned, words in (
        (other, "of sd15, and other.safetensors of sdxl"),
        (wide, "of base.safetensors and wide.safetensors have two sizes"),
    ):
        command = ["extract", str(pipeline.folder / "base.safetensors"), str(tuned), "--rank", "4"]
        assert main([*command, "--output", str(tmp_path / "out.safetensors")]) == 2
        assert words in " ".join(capsys.readouterr().err.split())
        assert not (tmp_path / "out.safetensors").exists()


def test_the_command_that_writes_a_lora_names_the_base_model_where_the_kind_needs_it():
    pair = LoraPair(torch.ones(1, 4), torch.ones(4, 1), 1.0)
    assert to_lora([pair]).endswith("--rank N")
    assert to_lora([pair, DecomposedUpdate(pair, torch.ones(4, 1))]).endswith("--rank N --model BASE")


def test_an_oft_in_sd_scripts_names_becomes_the_lora_that_it_is_in_those_of_lycoris(pipeline, tmp_path, capsys):
    """With a bound that the angles are beyond."""
    unet = base_unet(pipeline)
    tensors = load_file(written(tmp_path, "oft", trained("oft", unet), base_unet(pipeline), "sd15"))
    tensors = {key: torch.tensor(1e-4) if key.endswith(".alpha") else each for key, each in tensors.items()}
    found = []
    for prefix in ("lora_unet_", "oft_unet_"):
        named = {key.replace("lora_unet_", prefix): each for key, each in tensors.items()}
        path, out = tmp_path / f"{prefix}.safetensors", tmp_path / f"{prefix}lora.safetensors"
        save_file(named, path)
        base = ["--model", str(pipeline.folder / "base.safetensors"), "--family", "sd15"]
        assert main(["convert", str(path), str(out), "--to", "lora", "--rank", "4", *base]) == 0, (
            capsys.readouterr().err
        )
        found.append(load_file(out))
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])
    assert any(bool(each.any()) for key, each in found[0].items() if "lora_up" in key)


@pytest.mark.parametrize("kind", ["dora", "loha"])
def test_states_of_one_run_are_averaged_by_their_factors(kind, pipeline, tmp_path, capsys):
    """Not a file with the average of its changes, which is refused with what to do."""
    paths = []
    for steps in (2, 4):
        (tmp_path / str(steps)).mkdir()
        weights = trained(kind, base_unet(pipeline), steps)
        paths.append(written(tmp_path / str(steps), kind, weights, base_unet(pipeline), "sd15"))
    out = tmp_path / "mean.safetensors"
    command = ["average", *map(str, paths), "--weights", "1", "3", "--output", str(out)]
    assert main([*command, "--of", "parameters"]) == 0, capsys.readouterr().err
    first, second, mean = (load_file(path) for path in (*paths, out))
    assert mean.keys() == first.keys()
    for key, each in mean.items():
        assert torch.allclose(each, first[key] * 0.25 + second[key] * 0.75, rtol=1e-5, atol=1e-7), key
    assert read_adapter(out).metadata["ss_output_name"] == "mean"
    capsys.readouterr()
    assert main([*command, "--overwrite"]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "not a plain LoRA" in error
    assert "convert IN OUT --to lora" in error
