"""Every part is read layer by layer, bit-identical to the library's loading."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL
from safetensors.torch import load_file, save_file
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, T5Config, T5EncoderModel

from lora_trainer.core.io import sha256_file
from lora_trainer.models.folder import fingerprint, weights_digest
from lora_trainer.models.frozen import load_frozen
from lora_trainer.models.places import Place, laid_out_models, write_places
from tests.lora_format.tiny import tiny_vae

CPU = torch.device("cpu")
CLIP = {"vocab_size": 99, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
T5 = {"vocab_size": 99, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4}
MODELS = {
    AutoencoderKL: tiny_vae,
    CLIPTextModel: lambda: CLIPTextModel(CLIPTextConfig(**CLIP)),
    CLIPTextModelWithProjection: lambda: CLIPTextModelWithProjection(CLIPTextConfig(**CLIP, projection_dim=8)),
    T5EncoderModel: lambda: T5EncoderModel(T5Config(**T5, feed_forward_proj="gated-gelu")),
}


def same(one: Any, other: Any) -> None:
    for kind in ("named_parameters", "named_buffers"):
        ours, theirs = (dict(getattr(model, kind)(remove_duplicate=False)) for model in (one, other))
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            assert tensor.dtype == theirs[name].dtype, name
            assert torch.equal(tensor, theirs[name]), name


@pytest.fixture(params=MODELS, ids=lambda kind: kind.__name__)
def part(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Path]:
    torch.manual_seed(0)
    MODELS[request.param]().save_pretrained(tmp_path / "part")
    return request.param, tmp_path / "part"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_part_equals_what_its_library_reads(part: tuple[Any, Path], dtype: torch.dtype) -> None:
    kind, folder = part
    ours = load_frozen(kind, folder, dtype, CPU)
    same(ours, kind.from_pretrained(folder, dtype=dtype))
    assert not ours.training
    assert not any(each.requires_grad for each in ours.parameters())


def test_tied_weights_are_shared(tmp_path: Path) -> None:
    MODELS[T5EncoderModel]().save_pretrained(tmp_path)
    for left in ("shared.weight", "encoder.embed_tokens.weight"):
        tensors = load_file(tmp_path / "model.safetensors")
        words = tensors.pop("shared.weight", tensors.pop("encoder.embed_tokens.weight", None))
        save_file({**tensors, left: words}, tmp_path / "model.safetensors", {"format": "pt"})
        model = load_frozen(T5EncoderModel, tmp_path, torch.bfloat16, CPU)
        assert model.shared.weight is model.encoder.embed_tokens.weight
        assert torch.equal(model.shared.weight, words.to(torch.bfloat16))


def test_old_vae_attention_keys_are_renamed(tmp_path: Path) -> None:
    vae = tiny_vae()
    vae.save_pretrained(tmp_path)
    path = tmp_path / "diffusion_pytorch_model.safetensors"
    old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    tensors = load_file(path)
    for new, name in old.items():
        tensors = {key.replace(f".{new}.", f".{name}."): tensor for key, tensor in tensors.items()}
    assert any(".query." in name for name in tensors)
    save_file(tensors, path)
    same(load_frozen(AutoencoderKL, tmp_path, torch.float32, CPU), vae)


def test_weights_in_another_folder(part: tuple[Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole part in one file with other keys, rows of fused layers, transposed and with sizes of one."""
    monkeypatch.setenv("LORA_TRAINER_CACHE", str(tmp_path / "cache"))
    kind, folder = part
    tensors = load_file(next(folder.glob("*.safetensors")))
    file, stored, places = tmp_path / "all.safetensors", {}, {}
    for number, (name, tensor) in enumerate(sorted(tensors.items())):
        if tensor.ndim == 2 and number % 3 == 0:
            stored[f"x.{number}"], places[name] = tensor.t().contiguous(), Place(file, f"x.{number}", transposed=True)
        elif tensor.ndim == 2 and number % 3 == 1:
            stored[f"x.{number}"] = tensor[:, :, None, None].contiguous()
            places[name] = Place(file, f"x.{number}", squeezed=True)
        else:
            half = len(tensor) // 2
            swapped = torch.cat([torch.ones_like(tensor), tensor[half:], tensor[:half]])
            stored[f"x.{number}"] = swapped
            places[name] = Place(
                file, f"x.{number}", ((2 * len(tensor) - half, 2 * len(tensor)), (len(tensor), 2 * len(tensor) - half))
            )
    save_file({**stored, "other": torch.zeros(5)}, file)
    laid_out = laid_out_models() / "one" / "part"
    laid_out.mkdir(parents=True)
    (laid_out / "config.json").write_bytes((folder / "config.json").read_bytes())
    write_places(laid_out, places)
    same(load_frozen(kind, laid_out, torch.float32, CPU), load_frozen(kind, folder, torch.float32, CPU))
    first = weights_digest(laid_out), fingerprint(laid_out.parent, "part")
    stored = {**stored, "other": torch.ones(5)}
    save_file(stored, file)
    write_places(laid_out, places)
    assert (weights_digest(laid_out), fingerprint(laid_out.parent, "part")) == first, "what lies beside counts too"
    key = next(iter(places.values())).key
    save_file({**stored, key: stored[key] + 1}, file)
    write_places(laid_out, places)
    assert weights_digest(laid_out) != first[0]
    assert fingerprint(laid_out.parent, "part") != first[1]


def test_cache_keys_change_only_with_the_files_that_are_read(tmp_path: Path) -> None:
    """Other weights, files of other programs and of file managers do not count."""
    folder = tmp_path / "text_encoder"
    T5EncoderModel(T5Config(**T5)).save_pretrained(folder, max_shard_size="4KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    (folder / "vocab.json").write_text("{}")
    first = fingerprint(tmp_path, "text_encoder")
    lines = (f"text_encoder/{path.name}:{sha256_file(path)}\n" for path in sorted(folder.iterdir()))
    assert first == hashlib.sha256("".join(lines).encode()).hexdigest()[:32], "as caches of earlier versions have it"
    others = ("model.fp16.safetensors", "pytorch_model.bin", "pytorch_model.bin.index.json", "README.md", ".DS_Store")
    for name in (*others, "model.safetensors.index.fp16.json", "flax_model.msgpack", "Thumbs.db", "desktop.ini"):
        (folder / name).write_bytes(b"other")
        assert fingerprint(tmp_path, "text_encoder") == first, name
    for name in ("config.json", "vocab.json", next(folder.glob("*-of-*")).name, "model.safetensors.index.json"):
        before = (folder / name).read_bytes()
        (folder / name).write_bytes(before + b" ")
        assert fingerprint(tmp_path, "text_encoder") != first, name
        (folder / name).write_bytes(before)
    (folder / "added_tokens.json").write_text("{}")
    assert fingerprint(tmp_path, "text_encoder") != first
