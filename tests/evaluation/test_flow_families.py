"""Files with fused layers as in the original, evaluated and sampled on their families."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lora_trainer.cli.main import main
from lora_trainer.evaluation.compute import ON_CPU
from lora_trainer.evaluation.evidence import RealImages
from lora_trainer.evaluation.loading import adapted_modules, at_strength, components_of, judged, load_onto, without_lora
from lora_trainer.evaluation.lora_check import LoraGate, OpenLora, check_lora, open_lora
from lora_trainer.evaluation.placing import bring_pipeline
from lora_trainer.lora_format.weights import LoraWeights
from lora_trainer.lora_format.writing import FileLayout, write_lora
from lora_trainer.models.drawing import read_prompts
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.lora_names import names_of, read_lora
from tests.lora_format.tiny import facts, random_lora, tiny_pipeline, tiny_t5

CPU = torch.device("cpu")
ENDINGS = ("to_q", "proj_out", "SelfAttention.q", "wi_0", "wo")


@pytest.mark.parametrize(("kind", "name", "guidance"), [("sd3", "sd3", 4.5), ("flux-schnell", "flux", None)])
def test_fused_files_are_evaluated_and_sampled(
    kind: str, name: str, guidance: float | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    family, base = FAMILIES[name], tmp_path / "base"
    tiny_pipeline(tmp_path / "tokenizer", kind).save_pretrained(base)
    weights = random_lora(family.denoiser.load(base, torch.float32, CPU), size=0.3)
    modules = {f"transformer.{key.partition('.')[2]}": pair for key, pair in weights.modules.items()}
    written = write_lora(tmp_path, "cat", type(weights)(modules), facts(), FileLayout(names=names_of(family)))
    report = check_lora(written[0], base, family, RealImages(), LoraGate(check="lite", prompts=("a ring",)))
    assert report.parts["works"].outcome() == "passed"
    flags = ("--prompt", "a ring", "--size", "64x32", "--output", str(tmp_path / "out"))
    assert main(["sample", str(written[0]), "--model", str(base), *flags, "--num-inference-steps", "2"]) == 0
    recipe = json.loads((tmp_path / "out" / "cat_before_after.json").read_text(encoding="utf-8"))
    assert recipe["guidance"] == guidance
    images = [(tmp_path / "out" / f"cat_before_after_00_{side}.png").read_bytes() for side in ("without", "with")]
    assert images[0] != images[1]
    capsys.readouterr()
    code = main(["sample", str(written[0]), "--model", str(base), *flags, "--negative-prompt", "green"])
    assert code == (0 if guidance else 2)
    assert guidance or "without classifier-free guidance" in capsys.readouterr().err


@pytest.mark.parametrize(("kind", "name"), [("sd3", "sd3"), ("flux", "flux")])
def test_a_lora_on_t5_is_sampled_evaluated_and_disabled_with_the_rest(
    kind: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """diffusers silently skips T5, even in its own format: we load it ourselves."""
    family, base = FAMILIES[name], tmp_path / "base"
    (t5,) = family.text.cached
    tiny = tiny_pipeline(tmp_path / "tokenizer", kind)
    getattr(tiny, t5).bfloat16()  # as it is published
    tiny.save_pretrained(base)
    pipeline = family.pipeline.make(base, torch.float32, CPU)
    bring_pipeline(pipeline, family, CPU, None, (64, 64))
    parts = components_of(pipeline, family)
    modules = {
        module: pair
        for component in (family.denoiser.component, t5)
        for module, pair in random_lora(parts[component], component=component, endings=ENDINGS).modules.items()
    }
    version, _ = family.lora_files.base_names(family.describe(base))
    before = read_prompts(pipeline, family, ["a ring"])["a ring"]["embeds"]
    kohya, diffusers = write_lora(
        tmp_path, "cat", LoraWeights(modules), facts(base_version=version), FileLayout(names=names_of(family))
    )
    weights = read_lora(diffusers)
    assert read_lora(kohya).modules.keys() == weights.modules.keys() == modules.keys()
    assert load_onto(family.pipeline.make(base, torch.float32, CPU), diffusers) == []  # and nothing reported
    for file in (kohya, diffusers):
        fresh = family.pipeline.make(base, torch.float32, CPU)
        assert judged(fresh, family, file, read_lora(file)) == []
        assert adapted_modules(fresh, family) == len(modules)
        delta = (
            getattr(fresh, t5).get_submodule("encoder.block.0.layer.0.SelfAttention.q").get_delta_weight("default_0")
        )
        wanted = modules[f"{t5}.encoder.block.0.layer.0.SelfAttention.q"].delta()
        assert torch.allclose(delta, wanted, atol=2e-4)  # bf16 would be 20 times as far
        bring_pipeline(fresh, family, CPU, None, (64, 64))
        with without_lora(fresh):
            assert torch.equal(read_prompts(fresh, family, ["a ring"])["a ring"]["embeds"], before)
        with_lora, embeds = read_prompts(fresh, family, ["a ring"])["a ring"]["embeds"], {}
        for strength in (1.0, 0.5):
            with at_strength(fresh, strength):
                embeds[strength] = read_prompts(fresh, family, ["a ring"])["a ring"]["embeds"]
        assert torch.equal(embeds[1.0], with_lora)
        for other in (before, embeds[0.5]):
            assert not torch.allclose(with_lora, other, atol=1e-3)
    gate = LoraGate(check="lite", prompts=("a ring",), strengths=(1.0, 0.5))
    opened = open_lora(kohya, base, family, RealImages(), gate, ON_CPU)
    assert isinstance(opened, OpenLora)
    for strength in gate.strengths:
        assert torch.allclose(opened.texts[strength].prompts["embeds"], embeds[strength], atol=1e-5)
    quick = ("--set", "text_encoder.max_sequence_length=16", "--set", "gates.lora_check=lite")
    assert main(["validate", str(kohya), "--model", str(base), "--json", *quick]) == 4
    assert json.loads(capsys.readouterr().out)["parts"]["works"]["value"] == 1.0


def test_a_lora_on_t5_is_refused_by_a_base_model_without_t5(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    family, base = FAMILIES["sd3"], tmp_path / "base"
    tiny_pipeline(tmp_path / "tokenizer", "sd3-without-t5").save_pretrained(base)
    transformer = random_lora(family.denoiser.load(base, torch.float32, CPU), component="transformer")
    t5 = random_lora(tiny_t5(), component="text_encoder_3", endings=ENDINGS)
    kohya, _ = write_lora(
        tmp_path,
        "cat",
        LoraWeights({**transformer.modules, **t5.modules}),
        facts(base_version="sd3"),
        FileLayout(names=names_of(family)),
    )
    arguments = (str(kohya), "--model", str(base))
    expected = (
        f"{len(t5.modules)} modules of the LoRA are on a text encoder that the base model lacks (first: text_encoder_3."
    )
    assert main(["sample", *arguments, "--prompt", "a ring"]) == 2
    assert expected in capsys.readouterr().err
    assert main(["validate", *arguments, "--json"]) == 4
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert [expected in finding["message"] for finding in findings] == [True]
