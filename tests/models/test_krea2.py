"""Krea 2 from files: text embeddings, predictions and images of its pipeline, names in LoRA files."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import Krea2Pipeline

from lora_trainer.adapters.target_modules import target_modules
from lora_trainer.core.errors import UsageError
from lora_trainer.diffusion.timesteps import Shift
from lora_trainer.evaluation.recipe import Drawing, ImageRequest
from lora_trainer.evaluation.sample import draw
from lora_trainer.lora_format.layouts import rule_of
from lora_trainer.models.detection import detect_family
from lora_trainer.models.drawing import read_prompts
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.qwen_text import read_template
from tests.lora_format.tiny import qwen_tokenizer, tiny_pipeline, tiny_transformer

CPU = torch.device("cpu")
FAMILY = FAMILIES["krea2"]
CAPTIONS = ["a red ring on a blue background", "", "ring " * 300]


@pytest.fixture(scope="module", params=["krea2", "krea2-turbo"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / request.param
    tiny_pipeline(folder / "tokens", request.param).save_pretrained(folder / "model", safe_serialization=True)
    return folder / "model"


@pytest.fixture(scope="module")
def theirs(model: Path) -> Any:
    """diffusers' own, with the whole text encoder. It counts on five tokens at the end, which are thirteen bytes here."""
    pipeline = Krea2Pipeline.from_pretrained(model, local_files_only=True)
    end = pipeline.tokenizer(pipeline.prompt_template_encode_suffix).input_ids
    pipeline.prompt_template_encode_num_suffix_tokens = len(end)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def is_turbo(model: Path) -> bool:
    return model.parent.name == "krea2-turbo"


def test_the_family_is_recognized_by_its_pipeline_and_described(model):
    assert detect_family(model) == "krea2"
    facts, process = FAMILY.describe(model), FAMILY.denoiser.make_process(model)
    assert (facts.prediction, facts.pixel_step, facts.latent_channels, facts.caption_tokens) == ("flow", 16, 16, 512)
    turbo = is_turbo(model)
    assert (facts.variant, facts.distilled_from) == (("turbo", "Krea 2 Raw") if turbo else ("raw", ""))
    by_size = Shift(1.0, True, (256, 6400), (0.5, 1.15))
    factor = process.times.shift.of((128, 128))
    assert factor == pytest.approx(math.exp(1.15) if turbo else by_size.of((128, 128)))
    steps = FAMILY.pipeline.sampling_defaults(model)
    assert (steps.steps, steps.guided) == ((8, False) if turbo else (28, True))


def test_text_is_encoded_as_the_pipeline_does_with_the_padding_at_the_end(model, theirs):
    encoded = FAMILY.load_encoders(model, torch.float32, CPU).encode_text(CAPTIONS)
    with torch.no_grad():
        expected, masks = theirs.encode_prompt(list(CAPTIONS), max_sequence_length=512)
    assert encoded["padding"].dtype == torch.bool
    for embeds, padding, states, mask in zip(encoded["embeds"], encoded["padding"], expected, masks, strict=True):
        assert torch.allclose(embeds[~padding], states[mask], atol=1e-5)
        assert not embeds[padding].any()
        assert not bool(padding[: int(mask.sum())].any()), "nothing is padded inside"


def test_the_end_of_the_template_is_never_cut_and_has_no_weight():
    tokenizer = qwen_tokenizer()
    plain, here = read_template(tokenizer, ["a red ring", "ring " * 300], 300, CPU, whole_end=True)
    weighed, _ = read_template(tokenizer, [(("a ", 1.0), ("red ring", 2.0))], 300, CPU, whole_end=True)
    assert torch.equal(weighed.ids[0], plain.ids[0])
    assert tokenizer.decode(weighed.ids[0][34:][weighed.weights[0] == 2.0]) == "red ring"
    for ids, mask in zip(plain.ids, here, strict=True):
        assert tokenizer.decode(ids[mask]).endswith("<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("size", [(64, 64), (96, 48)])
def test_the_denoiser_gets_the_same_inputs_as_in_the_pipeline(model, theirs, size):
    calls: list[dict[str, Any]] = []
    watched = theirs.transformer.register_forward_hook(
        lambda module, args, named, output: calls.append({**named, "output": output[0]}), with_kwargs=True
    )
    arguments = {"num_inference_steps": 3, "output_type": "latent", "guidance_scale": 0.0}
    theirs("a ring", width=size[0], height=size[1], generator=torch.manual_seed(0), **arguments)
    watched.remove()
    cond = FAMILY.load_encoders(model, torch.float32, CPU).encode_text(["a ring"])
    transformer = FAMILY.denoiser.load(model, torch.float32, CPU)
    assert float(calls[0]["timestep"]) == 1.0 > float(calls[1]["timestep"]) > float(calls[2]["timestep"]) > 0.0
    for call in calls:
        tokens, rows, columns = call["hidden_states"], size[1] // 16, size[0] // 16
        noisy = tokens.view(1, rows, columns, 16, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(1, 16, 2 * rows, 2 * columns)
        seen: list[torch.Tensor] = []
        hook = transformer.register_forward_hook(lambda module, args, output: seen.append(output[0]))  # noqa: B023
        with torch.no_grad():
            FAMILY.denoiser.predict(transformer, noisy, call["timestep"] * 1000 - 1, cond, torch.zeros(1, 6))
        hook.remove()
        assert torch.allclose(seen[0], call["output"], atol=1e-5)


def test_captions_of_different_lengths_do_not_affect_each_other(model):
    transformer = FAMILY.denoiser.load(model, torch.float32, CPU)
    cond = FAMILY.load_encoders(model, torch.float32, CPU).encode_text(CAPTIONS)
    noisy, t = torch.randn(3, 16, 8, 12, generator=torch.manual_seed(0)), torch.tensor([10, 500, 999])
    with torch.no_grad():
        together = FAMILY.denoiser.predict(transformer, noisy, t, cond, torch.zeros(3, 6))
        for row in range(3):
            own = {name: value[row : row + 1] for name, value in cond.items()}
            alone = FAMILY.denoiser.predict(transformer, noisy[row : row + 1], t[row : row + 1], own, torch.zeros(1, 6))
            assert torch.allclose(together[row : row + 1], alone, atol=1e-5)


def test_images_are_the_pipelines_own(model, theirs):
    """Raw with guidance and a negative prompt, Turbo without."""
    prompts, guidance = ["a red ring", "a blue ring on a green background"], 0.0 if is_turbo(model) else 4.5
    generators = [torch.Generator("cpu").manual_seed(seed) for seed in (3, 4)]
    sizes: dict[str, Any] = {"width": 64, "height": 48, "num_inference_steps": 3}
    negative = {} if is_turbo(model) else {"negative_prompt": ["", ""]}
    expected = theirs(
        prompts, guidance_scale=guidance, generator=generators, output_type="pt", **negative, **sizes
    ).images
    pipeline = FAMILY.pipeline.make(model, torch.float32, CPU)
    read = read_prompts(pipeline, FAMILY, [*prompts, ""])
    rows = [ImageRequest(prompt, seed) for prompt, seed in zip(prompts, (3, 4), strict=True)]
    drawing = Drawing(steps=3, guidance=guidance or None, size=(64, 48), negative="", strengths=(1.0,))
    for image, other in zip(draw(pipeline, FAMILY, read, rows, drawing), expected, strict=True):
        ours = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(48, 64, 3).permute(2, 0, 1)
        assert (ours.float() / 255 - other).abs().max() <= 1 / 255


def test_norms_stay_in_fp32_in_a_half_precision_model(model):
    """As diffusers loads them: their weights are differences from 1."""
    ours = FAMILY.denoiser.load(model, torch.bfloat16, CPU)
    theirs = type(ours).from_pretrained(model / "transformer", torch_dtype=torch.bfloat16)
    assert {name: each.dtype for name, each in ours.state_dict().items()} == {
        name: each.dtype for name, each in theirs.state_dict().items()
    }


def test_targets_are_the_attention_with_its_gate_of_all_blocks(model):
    denoiser = FAMILY.denoiser.load(model, torch.float32, CPU)
    attention, both = (target_modules(denoiser, FAMILY.denoiser, each) for each in FAMILY.denoiser.lora_targets)
    assert len(attention) == 2 * 5
    assert set(both) - set(attention) == {
        f"transformer_blocks.{n}.ff.{name}" for n in (0, 1) for name in ("up", "down")
    }


def test_the_layout_has_every_linear_layer():
    for name, module in tiny_transformer("krea2").named_modules():
        assert not isinstance(module, torch.nn.Linear) or rule_of(FAMILY.lora_files.layout, name) is not None, name


@pytest.mark.parametrize(
    ("path", "changes", "words"),
    [
        ("transformer/config.json", {"text_hidden_dim": 32}, "text 32 wide"),
        ("model_index.json", {"text_encoder_select_layers": [1, 2]}, "states .1, 2.; .2, 5. can be followed"),
        ("model_index.json", {"text_encoder_select_layers": 1.5}, "states 1.5; .2, 5. can be followed"),
        ("transformer/config.json", {"in_channels": 128}, "128 input channels in place of 64"),
    ],
)
def test_other_models_are_refused_by_name(model, tmp_path, path, changes, words):
    other = Path(shutil.copytree(model, tmp_path / "other"))
    config = json.loads((other / path).read_text("utf-8"))
    (other / path).write_text(json.dumps({**config, **changes}), encoding="utf-8")
    with pytest.raises(UsageError, match=words):
        FAMILY.describe(other)


@pytest.mark.parametrize("layers", ["x", [36], None])
def test_a_text_encoder_with_a_damaged_number_of_layers_is_refused(model, tmp_path, layers):
    path = Path(shutil.copytree(model, tmp_path / "other")) / "text_encoder" / "config.json"
    config = json.loads(path.read_text("utf-8"))
    config["text_config"]["num_hidden_layers"] = layers
    path.write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(UsageError, match=r"num_hidden_layers is .*; it must be a whole number"):
        FAMILY.describe(tmp_path / "other")
