"""LoRAs merged into base models of every layout: as diffusers fuses them, in the stored types; and extracted again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from lora_trainer.cli.main import main
from lora_trainer.core.tensorfile import hash_of_tensors
from lora_trainer.lora_format.kinds.lora import LoraPair
from lora_trainer.lora_format.weights import LoraWeights, shapes_of
from lora_trainer.lora_format.writing import FileLayout, write_lora
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.lora_names import names_of, read_lora
from tests.lora_format.tiny import facts
from tests.models.single.originals import flow_checkpoint, unet_checkpoint, write
from tests.models.single.tiny import tiny_flow_pipeline, tiny_pipeline

VERSIONS = {"sd15": "sd_v1", "sdxl": "sdxl_base_v1-0", "flux": "flux1", "sd3": "sd3"}
WEIGHT = 0.7
# Linear layers, 1 x 1 and 3 x 3 convolutions of a U-Net; fused and plain layers, and the swapped last norm, of transformers.
CHANGED = {
    "sd15": ("attn1.to_q", "attn2.to_v", "proj_in", "conv1", "conv_shortcut", "downsamplers.0.conv", "q_proj", "fc1"),
    "sdxl": ("attn1.to_k", "to_out.0", "proj_out", "conv2", "time_emb_proj", "add_embedding.linear_1", "v_proj", "fc2"),
    "flux": ("to_q", "to_v", "add_k_proj", "proj_mlp", "proj_out", "norm1.linear", "norm_out.linear", "k_proj"),
    "sd3": ("to_k", "add_q_proj", "to_add_out", "norm_out.linear", "norm1_context.linear", "q_proj"),
}


def pipeline_of(family: str, folder: Path) -> Any:
    if family in ("sd15", "sdxl"):
        return tiny_pipeline(folder / "words", family)
    return tiny_flow_pipeline(folder / "words", "flux-dev" if family == "flux" else family)


def checkpoint_of(pipeline: Any, family: str) -> dict[str, Tensor]:
    return unet_checkpoint(pipeline, family) if family in ("sd15", "sdxl") else flow_checkpoint(pipeline)


def random_lora(pipeline: Any, family: str, *, rank: int = 3, alpha: float = 2.0, size: float = 0.05) -> LoraWeights:
    """On the denoiser and on CLIP; each module another down projection."""
    generator = torch.Generator().manual_seed(11)
    parts = {FAMILIES[family].denoiser.component: None, "text_encoder": None}
    if family in ("sdxl", "sd3"):
        parts["text_encoder_2"] = None
    modules = {}
    for name, shape in shapes_of({part: getattr(pipeline, part) for part in parts}).items():
        if name.endswith(CHANGED[family]):
            down = torch.randn(rank, *shape[1:], generator=generator) * size
            up = torch.randn(shape[0], rank, *[1] * (len(shape) - 2), generator=generator)
            modules[name] = LoraPair(down, up, alpha)
    assert {name.partition(".")[0] for name in modules} == set(parts)
    return LoraWeights(modules)


def written_lora(folder: Path, lora: LoraWeights, family: str, name: str = "cat") -> tuple[Path, Path]:
    layout = FileLayout(torch.float32, names=names_of(FAMILIES[family]))
    return write_lora(folder, name, lora, facts(base_version=VERSIONS[family], architecture="a/lora"), layout)


def metadata_of(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return dict(file.metadata() or {})


def same(found: dict[str, Tensor], expected: dict[str, Tensor], before: dict[str, Tensor]) -> int:
    """That changed tensors are the expected ones, and all others bit for bit as before; how many changed."""
    assert found.keys() == expected.keys() == before.keys()
    changed = 0
    for name, tensor in found.items():
        if torch.equal(expected[name], before[name]):
            assert torch.equal(tensor, before[name]), name
        else:
            assert torch.allclose(tensor, expected[name], atol=2e-6, rtol=1e-5), name
            changed += 1
    return changed


@pytest.mark.parametrize("family", CHANGED)
def test_a_merged_base_is_what_diffusers_fuses_and_gives_the_lora_back(family, tmp_path, capsys):
    pipeline = pipeline_of(family, tmp_path)
    before = {name: tensor.clone() for name, tensor in checkpoint_of(pipeline, family).items()}
    base, merged = write(before, tmp_path / "base.safetensors", {"modelspec.title": "mine"}), tmp_path / "m.safetensors"
    pipeline.save_pretrained(tmp_path / "base")
    lora = random_lora(pipeline, family)
    kohya, diffusers = written_lora(tmp_path, lora, family)
    command = ["merge", str(kohya), "--weights", str(WEIGHT), "--into"]
    assert main([*command, str(base), "--output", str(merged)]) == 0, capsys.readouterr().err
    assert main([*command, str(tmp_path / "base"), "--output", str(tmp_path / "merged")]) == 0, capsys.readouterr().err
    pipeline.load_lora_weights(str(diffusers.parent), weight_name=diffusers.name)
    pipeline.fuse_lora(components=sorted({name.partition(".")[0] for name in lora.modules}), lora_scale=WEIGHT)
    pipeline.unload_lora_weights()
    found = load_file(merged)
    assert same(found, checkpoint_of(pipeline, family), before) > 5
    assert list(found) == list(load_file(base))
    again = type(pipeline).from_pretrained(tmp_path / "merged")
    for part in {name.partition(".")[0] for name in lora.modules}:
        ours, theirs = getattr(again, part).state_dict(), getattr(pipeline, part).state_dict()
        assert all(torch.allclose(ours[name], theirs[name], atol=2e-6, rtol=1e-5) for name in theirs)
    header = metadata_of(merged)
    assert header["modelspec.title"] == "mine"
    assert header["modelspec.merged_from"] == "base.safetensors, cat.safetensors"
    assert header["modelspec.hash_sha256"] == hash_of_tensors(merged)
    assert json.loads(header["lora_trainer.origin"])["files"] == [{"name": "cat.safetensors", "weight": WEIGHT}]

    out = tmp_path / "back.safetensors"
    extract = ["extract", str(base), str(merged), "--rank", "3", "--dtype", "fp32", "--output", str(out)]
    assert main(extract) == 0, capsys.readouterr().err
    back = read_lora(out)
    assert back.family == family
    assert back.modules.keys() == lora.modules.keys()
    for name, pair in lora.modules.items():
        exact = pair.delta() * WEIGHT
        assert float((back.modules[name].delta() - exact).norm() / exact.norm()) < 1e-4, name
        assert back.modules[name].rank == 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_a_base_keeps_its_types_and_rounding_is_reported(dtype, tmp_path, capsys):
    pipeline = pipeline_of("sd15", tmp_path)
    whole = checkpoint_of(pipeline, "sd15")
    unet = "model.diffusion_model."
    tensors = {
        name: each.to(dtype) if name.startswith(unet) and each.ndim > 1 else each for name, each in whole.items()
    }
    base, merged = write(tensors, tmp_path / "base.safetensors"), tmp_path / "merged.safetensors"
    lora = random_lora(pipeline, "sd15", size=0.01)
    kohya, _ = written_lora(tmp_path, lora, "sd15")
    assert main(["merge", str(kohya), "--into", str(base), "--output", str(merged), "--json"]) == 0
    document, found = json.loads(capsys.readouterr().out), load_file(merged)
    errors = {row["name"]: row["error"] for row in document["layers"]}
    assert errors.keys() == lora.modules.keys()
    assert all(found[name].dtype == each.dtype for name, each in tensors.items())
    name, key = (
        "unet.down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q",
        f"{unet}input_blocks.1.1.transformer_blocks.0.attn1.to_q.weight",
    )
    change = lora.modules[name].delta()
    exact = tensors[key].float() + change
    assert torch.equal(found[key], exact.to(dtype))
    assert errors[name] == pytest.approx(float((found[key].float() - exact).norm() / change.norm()), rel=1e-4)
    assert (max(errors.values()) > 0.1) == any("rounds" in note for note in document["notes"])


def test_several_loras_are_merged_into_a_bare_transformer_at_once(tmp_path, capsys):
    """A file of the transformer alone, as FLUX.1 is published; the sum is rounded once."""
    pipeline = pipeline_of("flux", tmp_path)
    tensors = flow_checkpoint(pipeline, bare=True)
    base, merged = write(tensors, tmp_path / "base.safetensors"), tmp_path / "merged.safetensors"
    whole = random_lora(pipeline, "flux")
    lora = LoraWeights({name: pair for name, pair in whole.modules.items() if name.startswith("transformer.")})
    one, _ = written_lora(tmp_path, lora, "flux", "one")
    _, two = written_lora(tmp_path, lora, "flux", "two")
    command = ["merge", str(one), str(two), "--weights", "1", "-1", "--into", str(base), "--output", str(merged)]
    assert main(command) == 0, capsys.readouterr().err
    found = load_file(merged)
    assert all(torch.allclose(found[name], each, atol=1e-6) for name, each in tensors.items())
    first = dict(list(lora.modules.items())[:1])
    less, _ = written_lora(tmp_path, LoraWeights(first), "flux", "less")
    outputs = [tmp_path / "alone.safetensors", tmp_path / "with.safetensors"]
    into = ["--into", str(base), "--output"]
    assert main(["merge", str(less), *into, str(outputs[0])]) == 0, capsys.readouterr().err
    # `one` alone has most of these layers, and its weight is 0.
    assert main(["merge", str(one), str(less), "--weights", "0", "1", *into, str(outputs[1])]) == 0
    assert "left out, with weight 0: one.safetensors" in " ".join(capsys.readouterr().err.split())
    alone, with_none = map(load_file, outputs)
    assert all(torch.equal(each, with_none[name]) for name, each in alone.items())
    assert sum(not torch.equal(each, tensors[name]) for name, each in alone.items()) == 1
    text, _ = written_lora(tmp_path, whole, "flux", "text")
    assert main(["merge", str(text), "--into", str(base), "--output", str(tmp_path / "x.safetensors")]) == 2
    assert "text_encoder, which base.safetensors does not hold" in " ".join(capsys.readouterr().err.split())


def test_extraction_names_what_a_lora_cannot_hold_and_refuses_equal_models(tmp_path, capsys):
    pipeline = pipeline_of("sd15", tmp_path)
    before = {name: each.clone() for name, each in checkpoint_of(pipeline, "sd15").items()}
    base, out = write(before, tmp_path / "base.safetensors"), tmp_path / "out.safetensors"
    norm = "model.diffusion_model.out.0.weight"
    equal = write(before | {norm: before[norm] + 1}, tmp_path / "equal.safetensors")
    assert main(["extract", str(base), str(equal), "--rank", "4", "--output", str(out)]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "have the same" in error
    assert "1 weight of norms, biases and embeddings (unet.conv_norm_out.weight)" in error
    key = "model.diffusion_model.input_blocks.1.1.transformer_blocks.0.attn1.to_q.weight"
    torch.manual_seed(0)
    change = torch.randn(before[key].shape)
    tuned = write(before | {norm: before[norm] + 1, key: before[key] + change}, tmp_path / "tuned.safetensors")
    command = ["extract", str(base), str(tuned), "--rank", "8", "--output", str(out), "--json"]
    assert main(command) == 0
    document = json.loads(capsys.readouterr().out)
    (row,) = document["layers"]
    values = torch.linalg.svdvals(change)
    assert row["error"] == pytest.approx(float(values[8:].norm() / values.norm()), rel=1e-3)
    assert any("unet.conv_norm_out.weight" in note for note in document["notes"])
    assert load_file(out)[next(iter(load_file(out)))].dtype in (torch.float16, torch.float32)
    assert {each.dtype for name, each in load_file(out).items() if "lora_" in name.rpartition(".lora_")[1]} == {
        torch.float16
    }
    assert metadata_of(out)["ss_base_model_version"].startswith("sd_v1")
    assert main([*command, "--overwrite", "--clamp-quantile", "0.9"]) == 0
    clamped = json.loads(capsys.readouterr().out)["layers"][0]
    assert clamped["error"] > row["error"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_the_memory_of_a_merge_does_not_grow_with_the_base(tmp_path):
    """600 MB of random weights at SD1.5's names: the peak above that of reading the LoRA is a few layers."""
    pipeline = pipeline_of("sd15", tmp_path)
    tensors = checkpoint_of(pipeline, "sd15")
    lora = LoraWeights({name: each for name, each in random_lora(pipeline, "sd15").modules.items() if "unet" in name})
    kohya, _ = written_lora(tmp_path, lora, "sd15")
    small = write(tensors, tmp_path / "small.safetensors")
    filler = {f"first_stage_model.filler.{number}": torch.randn(5_000_000) for number in range(30)}
    save_file({name: each.contiguous() for name, each in (tensors | filler).items()}, tmp_path / "large.safetensors")
    assert (tmp_path / "large.safetensors").stat().st_size > 600_000_000
    program = (
        "import re, sys; from lora_trainer.cli.main import main; code = main(sys.argv[1:]);"
        # Not ru_maxrss, which begins with that of the process that started it.
        "print(int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]) // 1024); sys.exit(code)"
    )
    peaks = []
    for base in (small, tmp_path / "large.safetensors"):
        command = [
            "merge",
            str(kohya),
            "--into",
            str(base),
            "--output",
            str(tmp_path / f"{base.stem}-merged.safetensors"),
        ]
        done = subprocess.run([sys.executable, "-c", program, *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout.split()[-1]))
    assert peaks[1] - peaks[0] < 40, peaks
