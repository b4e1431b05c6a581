"""The family of a file with ambiguous keys, and the programs that read it according to `inspect`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lora_trainer.core.errors import UsageError
from lora_trainer.lora_format.diffusers import diffusers_tensors
from lora_trainer.lora_format.kinds.lora import LoraPair
from lora_trainer.lora_format.kohya import kohya_tensors
from lora_trainer.lora_format.weights import LoraWeights
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.lora_clients import Client, clients
from lora_trainer.models.lora_names import convert_lora, inspect_lora, names_of, read_lora
from tests.lora_format.tiny import random_lora, tiny_pipeline

HEADER = {"ss_base_model_version": "sd_v1"}
SELF_ATTENTION = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"


def saved(path: Path, tensors: dict[str, Tensor], header: dict[str, str] | None = None) -> Path:
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path, metadata=header)
    return path


def attention(width: int, blocks: int, *more: str) -> LoraWeights:
    leaves = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", *more)
    names = [f"transformer.transformer_blocks.{block}.{leaf}" for block in range(blocks) for leaf in leaves]
    return LoraWeights({name: LoraPair(torch.randn(1, width), torch.randn(width, 1), 1.0) for name in names})


@pytest.mark.parametrize(
    ("width", "blocks", "more", "family"),
    [
        (1536, 24, (), "sd3"),  # 3.0 and 3.5 medium
        (2432, 38, (), "sd3"),  # 3.5 large
        (3072, 60, (), "qwen_image"),
        (4096, 32, (), "qwen_image21"),
        (64, 2, (), None),
        (1536, 24, ("other_mod.1",), None),
    ],
)
def test_keys_that_families_share_are_distinguished_by_shapes(
    width: int, blocks: int, more: tuple[str, ...], family: str | None, tmp_path: Path
) -> None:
    path = saved(tmp_path / "theirs.safetensors", diffusers_tensors(attention(width, blocks, *more)))
    assert read_lora(path).family == family
    if family is None:
        with pytest.raises(UsageError, match="--family"):
            convert_lora(path, tmp_path / "out.safetensors", "kohya")
        assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.slow
def test_flux_double_blocks_alone_are_recognized_by_their_shapes(tmp_path: Path) -> None:
    path = saved(tmp_path / "theirs.safetensors", diffusers_tensors(attention(3072, 19)))
    assert read_lora(path).family == "flux"


def client(path: Path, name: str) -> Client:
    return next(each for each in clients(inspect_lora(path)) if each.name == name)


def loaded(path: Path, weights: LoraWeights, folder: Path, kind: str = "sd15") -> list[float]:
    """The relative error of the update that diffusers applies, per module."""
    pipeline = tiny_pipeline(folder, kind)
    pipeline.load_lora_weights(str(path.parent), weight_name=path.name)
    gaps = []
    for name, pair in weights.modules.items():
        component, _, rest = name.partition(".")
        layer = getattr(pipeline, component).get_submodule(rest)
        gap = layer.get_delta_weight(next(iter(layer.scaling))).detach().flatten() - pair.delta().flatten()
        gaps.append(float(gap.norm() / pair.delta().norm()))
    return gaps


def unet_lora(folder: Path) -> LoraWeights:
    return random_lora(tiny_pipeline(folder).unet, rank=4, alpha=4.0, endings=("to_q", "to_k"))


def mixed(weights: LoraWeights, alphas: tuple[float, float]) -> LoraWeights:
    """Every second module of rank 2."""
    ranks = (4, 2)
    return LoraWeights(
        {
            name: LoraPair(pair.down[: ranks[at % 2]], pair.up[:, : ranks[at % 2]], alphas[at % 2])
            for at, (name, pair) in enumerate(weights.modules.items())
        }
    )


@pytest.mark.parametrize("alphas", [(4.0, 2.0), (4.0, 4.0), (2.6, 2.6)])
def test_diffusers_reads_kohya_files_with_different_ranks(alphas: tuple[float, float], tmp_path: Path) -> None:
    weights = mixed(unet_lora(tmp_path), alphas)
    path = saved(tmp_path / "a.safetensors", kohya_tensors(weights)[0], HEADER)
    assert max(loaded(path, weights, tmp_path)) < 1e-5
    assert client(path, "diffusers").reads == "whole"


@pytest.mark.filterwarnings("ignore:The following alpha_pattern keys")
def test_different_alphas_change_the_strength_in_diffusers(tmp_path: Path) -> None:
    weights = mixed(unet_lora(tmp_path), (4.0, 3.0))
    path = saved(tmp_path / "a.safetensors", kohya_tensors(weights)[0], HEADER)
    assert max(loaded(path, weights, tmp_path)) > 0.1
    assert client(path, "diffusers").reads == "in part"
    done = convert_lora(path, tmp_path / "b.safetensors", "kohya")
    assert any("diffusers" in note for note in done.notes)


def test_alphas_of_components_may_differ(tmp_path: Path) -> None:
    text = LoraPair(torch.randn(4, 768), torch.randn(768, 4), 2.0)
    name = "text_encoder.text_model.encoder.layers.0.self_attn.q_proj"
    weights = LoraWeights({**unet_lora(tmp_path).modules, name: text})
    path = saved(tmp_path / "a.safetensors", kohya_tensors(weights)[0], HEADER)
    assert client(path, "diffusers").reads == "whole"


@pytest.mark.parametrize("kind", ["sd15", "sd3"])
def test_diffusers_refuses_alpha_keys_in_its_own_format(kind: str, tmp_path: Path) -> None:
    pipeline = tiny_pipeline(tmp_path, kind)
    component = FAMILIES[kind].denoiser.component
    part = random_lora(getattr(pipeline, component), rank=4, alpha=4.0, endings=("attn1.to_q", "attn.to_q"))
    modules = {name.replace("unet.", f"{component}.", 1): pair for name, pair in part.modules.items()}
    alphas = {f"{name}.alpha": torch.tensor(4.0) for name in modules}
    header = HEADER if kind == "sd15" else {"ss_base_model_version": "sd3"}
    path = saved(tmp_path / "a.safetensors", diffusers_tensors(LoraWeights(modules)) | alphas, header)
    with pytest.raises(ValueError):  # noqa: PT011 (whichever of its own it raises)
        pipeline.load_lora_weights(str(tmp_path), weight_name=path.name)
    assert client(path, "diffusers").reads == "not"


def test_a_unet_file_of_unknown_size_is_recognized(tmp_path: Path) -> None:
    weights = LoraWeights({f"unet.{SELF_ATTENTION}": LoraPair(torch.randn(4, 320), torch.randn(320, 4), 4.0)})
    path = saved(tmp_path / "a.safetensors", kohya_tensors(weights)[0])
    assert read_lora(path).family is None
    readers = {each.name: each.reads for each in clients(inspect_lora(path))}
    assert readers == {"diffusers": "whole", "ComfyUI": "whole", "A1111, Forge": "whole", "sd-scripts": "whole"}


def test_a_file_of_an_unknown_family_has_unknown_readers(tmp_path: Path) -> None:
    name = "lora_te1_text_model_encoder_layers_0_mlp_fc1"
    tensors = {f"{name}.lora_down.weight": torch.randn(4, 768), f"{name}.lora_up.weight": torch.randn(3072, 4)}
    assert client(saved(tmp_path / "a.safetensors", tensors), "diffusers").reads == "unknown"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_lists_the_programs_that_read_its_files(family: str) -> None:
    assert FAMILIES[family].lora_files.readers
    assert {each.partition(": ")[0] for each in FAMILIES[family].lora_files.readers} <= {
        "diffusers",
        "ComfyUI",
        "sd-scripts",
    }
    assert names_of(FAMILIES[family]).prefixes


def test_a_lokr_in_kohyas_names_is_read_whole_by_comfyui(tmp_path: Path) -> None:
    name = f"lora_unet_{SELF_ATTENTION.replace('.', '_')}"
    tensors = {f"{name}.lokr_w1": torch.randn(16, 16), f"{name}.lokr_w2": torch.randn(20, 20)}
    path = saved(tmp_path / "a.safetensors", tensors, HEADER)
    assert inspect_lora(path).style == "kohya"
    assert client(path, "ComfyUI").reads == "whole"


DOUBLE, ORIGINAL = "transformer_blocks.0.attn.to_out.0", "double_blocks.0.img_attn.proj"


@pytest.mark.parametrize(
    ("name", "halves", "style", "expected"),
    [
        (f"lora_unet_{ORIGINAL}", "lora_", "kohya", "whole whole whole"),
        (f"lora_unet_{DOUBLE}", "lora_", "kohya, diffusers' names", "not not not"),
        (f"lora_transformer_{DOUBLE}", "lora_", "OneTrainer", "not whole not"),
        (f"lycoris_{DOUBLE}", "lora_", "LyCORIS", "not whole not"),
        (f"diffusion_model.{ORIGINAL}", "A", "original", "not whole not"),
        (f"diffusion_model.{ORIGINAL}", "lora_", "original, kohya's halves", "whole whole not"),
        (f"diffusion_model.{DOUBLE}", "A", "original, diffusers' names", "not not not"),
        (f"model.diffusion_model.{ORIGINAL}", "A", "original, model first", "not not not"),
        (f"transformer.{DOUBLE}", "A", "diffusers", "whole whole not"),
        (f"transformer.{DOUBLE}", "lora_", "diffusers, kohya's halves", "not whole not"),
        (f"transformer.{ORIGINAL}", "A", "diffusers, original names", "not not not"),
        (f"base_model.model.{DOUBLE}", "A", "peft", "not not not"),
        (f"transformer.base_model.model.{DOUBLE}", "A", "peft inside", "not not not"),
        (DOUBLE, "A", "no prefix", "not whole not"),
        (ORIGINAL, "A", "original, no prefix", "not not not"),
        ("double_blocks.0.processor.proj_lora1", "", "XLabs", "whole unknown not"),
        ("lora_unet_final_layer_linear", "lora_", "kohya", "in_part whole in_part"),
    ],
)
def test_how_each_program_reads_each_style(name: str, halves: str, style: str, expected: str, tmp_path: Path) -> None:
    """As observed with diffusers 0.42.1, ComfyUI 0.33.0 and sd-scripts, with FLUX.1 files."""
    key = name.replace(".", "_") if name.startswith(("lora_", "lycoris_")) else name
    down, up = {"A": ("lora_A", "lora_B")}.get(halves, (f"{halves}down", f"{halves}up"))
    tensors = {f"{key}.{down}.weight": torch.randn(4, 8), f"{key}.{up}.weight": torch.randn(8, 4)}
    path = saved(tmp_path / "a.safetensors", tensors, {"modelspec.architecture": "flux-1-dev/lora"})
    found = inspect_lora(path)
    reads = {each.name: each.reads.replace(" ", "_") for each in clients(found)}
    assert (found.style, found.weights.family) == (style, "flux")
    assert " ".join(reads[name] for name in ("diffusers", "ComfyUI", "sd-scripts")) == expected
