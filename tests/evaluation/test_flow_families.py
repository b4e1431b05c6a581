"""Files whose layers are fused as the original fuses them: judged and drawn on the families that have such."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lora_trainer.cli.main import main
from lora_trainer.evaluation.lora_check import check_lora
from lora_trainer.export.lora_file import write_lora
from lora_trainer.export.weights import shapes_of
from lora_trainer.models import FAMILIES
from lora_trainer.models.lora_files import names_of
from tests.export.tiny import facts, random_lora, tiny_pipeline

CPU = torch.device("cpu")


@pytest.mark.parametrize(("kind", "name", "guidance"), [("sd3", "sd3", 4.5), ("flux-schnell", "flux", None)])
def test_fused_files_are_judged_and_drawn(
    kind: str, name: str, guidance: float | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    family, base = FAMILIES[name], tmp_path / "base"
    tiny_pipeline(tmp_path / "tokenizer", kind).save_pretrained(base)
    weights = random_lora(family.load_denoiser(base, torch.float32, CPU), size=0.3)
    modules = {f"transformer.{key.partition('.')[2]}": pair for key, pair in weights.modules.items()}
    written = write_lora(tmp_path, "cat", type(weights)(modules), facts(), names=names_of(family))
    assert check_lora(written[0], base, family, [], prompts=("a ring",)).parts["integrity"] == 1.0
    flags = ("--prompt", "a ring", "--size", "64x32", "--output", str(tmp_path / "out"))
    assert main(["sample", str(written[0]), "--model", str(base), *flags, "--steps", "2"]) == 0
    recipe = json.loads((tmp_path / "out" / "cat_before_after.json").read_text(encoding="utf-8"))
    assert recipe["guidance"] == guidance
    pictures = [(tmp_path / "out" / f"cat_before_after_00_{side}.png").read_bytes() for side in ("without", "with")]
    assert pictures[0] != pictures[1]
    capsys.readouterr()
    code = main(["sample", str(written[0]), "--model", str(base), *flags, "--negative", "green"])
    assert code == (0 if guidance else 2)
    assert guidance or "without classifier-free guidance" in capsys.readouterr().err


@pytest.mark.parametrize(("kind", "name", "encoder"), [("sd3", "sd3", "3"), ("flux", "flux", "2")])
def test_a_lora_on_t5_is_refused_for_what_it_is(
    kind: str, name: str, encoder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    family, base = FAMILIES[name], tmp_path / "base"
    tiny_pipeline(tmp_path / "tokenizer", kind).save_pretrained(base)
    own = shapes_of({"transformer": family.load_denoiser(base, torch.float32, CPU)})
    denoiser = next(module for module in own if module.endswith("attn.to_q"))
    shapes = {
        denoiser: own[denoiser],
        f"text_encoder_{encoder}.encoder.block.0.layer.0.SelfAttention.q": (8, 8),
    }
    tensors = {}
    for module, (out, into) in shapes.items():
        tensors |= {f"{module}.lora_A.weight": torch.ones(2, into), f"{module}.lora_B.weight": torch.ones(out, 2)}
    save_file(tensors, tmp_path / "t5.safetensors")
    asked = (str(tmp_path / "t5.safetensors"), "--model", str(base))
    said = "1 modules of the LoRA are on T5 or a language model (first: text_encoder_3.encoder.block.0"
    assert main(["sample", *asked, "--prompt", "a ring"]) == 2
    assert said in capsys.readouterr().err
    assert main(["validate", *asked, "--json"]) == 4
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert [said in finding["message"] for finding in findings] == [True]
