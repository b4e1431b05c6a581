"""Anima from files: text embeddings, predictions and images of diffusers' blocks, names in LoRA files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import ClassifierFreeGuidance, ModularPipeline
from safetensors.torch import save_file

from lora_trainer.adapters.target_modules import target_modules
from lora_trainer.core.errors import UsageError
from lora_trainer.diffusion.timesteps import Shift
from lora_trainer.evaluation.recipe import Drawing, ImageRequest
from lora_trainer.evaluation.sample import draw
from lora_trainer.lora_format.kohya import kohya_tensors
from lora_trainer.lora_format.layouts import rule_of
from lora_trainer.models.detection import detect_family
from lora_trainer.models.drawing import read_prompts
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.family import TextOptions
from lora_trainer.models.lora_clients import clients
from lora_trainer.models.lora_names import inspect_lora, names_of, read_adapter
from lora_trainer.run.bases.hub_files import choose_files, files_in
from tests.lora_format.tiny import random_lora, tiny_pipeline, tiny_transformer

CPU = torch.device("cpu")
FAMILY = FAMILIES["anima"]
CAPTIONS = ["a red ring on a blue background", "", "ring " * 300]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_pipeline(folder / "tokens", "anima").save_pretrained(folder / "anima")
    return folder / "anima"


@pytest.fixture(scope="module")
def theirs(model: Path) -> Any:
    """diffusers' own, from its files. Its transformer needs torchvision, or what `cosmos_transformer` puts in its place."""
    FAMILY.denoiser.make(json.loads((model / "transformer" / "config.json").read_text("utf-8")))
    pipeline = ModularPipeline.from_pretrained(str(model), local_files_only=True)
    pipeline.load_components(local_files_only=True)
    return pipeline


def test_the_family_is_recognized_by_its_index_and_described(model):
    assert not (model / "model_index.json").exists()
    assert detect_family(model) == "anima"
    facts = FAMILY.describe(model)
    assert (facts.prediction, facts.pixel_step, facts.latent_channels, facts.caption_tokens) == ("flow", 16, 16, 512)
    assert facts.largest_side == 2048
    assert FAMILY.denoiser.make_process(model).times.shift.of((128, 128)) == 3.0
    assert isinstance(FAMILY.denoiser.make_process(model).times.shift, Shift)


def test_text_is_encoded_as_the_blocks_do(model, theirs):
    encoded = FAMILY.load_encoders(model, torch.float32, CPU).encode_text(CAPTIONS)
    for caption, embeds in zip(CAPTIONS, encoded["embeds"], strict=True):
        found = theirs.blocks.sub_blocks["text_encoder"].encode_prompt(
            theirs, caption, prepare_unconditional_embeds=False
        )
        with torch.no_grad():
            expected = theirs.text_conditioner(
                found["qwen_prompt_embeds"],
                found["t5_input_ids"],
                target_attention_mask=found["t5_attention_mask"],
                source_attention_mask=found["qwen_attention_mask"],
            )
        assert expected.shape == (1, 512, 64)
        assert torch.allclose(embeds, expected[0], atol=1e-5)
    assert not torch.equal(encoded["embeds"][0], encoded["embeds"][1])


def test_weights_are_those_of_the_tokens_that_the_conditioner_answers_for(model):
    encode = FAMILY.load_encoders(model, torch.float32, CPU).encode_text
    plain, weighed = (encode([caption])["embeds"][0] for caption in ("a red ring", (("a red ", 1.0), ("ring", 1.5))))
    words = encode(["a red "])["embeds"][0].any(-1).sum() - 1  # without the end
    ratio = (weighed / plain)[: int(plain.any(-1).sum())]
    assert torch.allclose(ratio[:words], ratio[0, 0].expand_as(ratio[:words]), atol=1e-4)
    assert torch.allclose(ratio[words : words + 1], 1.5 * ratio[:1], atol=1e-4)


@pytest.mark.parametrize("size", [(64, 64), (96, 48)])
def test_the_denoiser_gets_the_same_inputs_as_in_the_pipeline(model, theirs, size):
    calls: list[dict[str, Any]] = []
    watched = theirs.transformer.register_forward_hook(
        lambda module, args, named, output: calls.append({**named, "output": output[0]}), with_kwargs=True
    )
    theirs.update_components(guider=ClassifierFreeGuidance(guidance_scale=1.0))
    theirs(prompt="a ring", width=size[0], height=size[1], generator=torch.manual_seed(0), num_inference_steps=3)
    watched.remove()
    cond = FAMILY.load_encoders(model, torch.float32, CPU).encode_text(["a ring"])
    transformer = FAMILY.denoiser.load(model, torch.float32, CPU)
    assert [float(call["timestep"]) for call in calls] == pytest.approx([1.0, 6 / 7, 0.6], abs=1e-3)
    for call in calls:
        with torch.no_grad():
            velocity = FAMILY.denoiser.predict(
                transformer, call["hidden_states"][:, :, 0], call["timestep"] * 1000 - 1, cond, torch.zeros(1, 6)
            )
        assert torch.allclose(velocity, call["output"][:, :, 0], atol=1e-5)


def test_images_are_the_pipelines_own(model, theirs):
    """With guidance and an empty negative prompt, and without guidance."""
    prompts = ["a red ring", "a blue ring on a green background"]
    sizes: dict[str, Any] = {"width": 64, "height": 48, "num_inference_steps": 3}
    pipeline = FAMILY.pipeline.make(model, torch.float32, CPU)
    read = read_prompts(pipeline, FAMILY, [*prompts, ""])
    rows = [ImageRequest(prompt, seed) for prompt, seed in zip(prompts, (3, 4), strict=True)]
    for guidance in (4.0, None):
        theirs.update_components(guider=ClassifierFreeGuidance(guidance_scale=guidance or 1.0))
        generators = [torch.Generator("cpu").manual_seed(seed) for seed in (3, 4)]
        expected = theirs(prompt=prompts, generator=generators, output_type="pt", **sizes).images
        drawing = Drawing(steps=3, guidance=guidance, size=(64, 48), negative="", strengths=(1.0,))
        for image, other in zip(draw(pipeline, FAMILY, read, rows, drawing), expected, strict=True):
            ours = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(48, 64, 3).permute(2, 0, 1)
            assert (ours.float() / 255 - other).abs().max() <= 1 / 255


def test_all_layers_of_the_targets_learn(model):
    transformer = FAMILY.denoiser.load(model, torch.float32, CPU).requires_grad_(True)
    cond = FAMILY.load_encoders(model, torch.float32, CPU).encode_text(CAPTIONS[:1])
    noisy = torch.randn(1, 16, 8, 8, generator=torch.manual_seed(0))
    FAMILY.denoiser.predict(transformer, noisy, torch.tensor([500]), cond, torch.zeros(1, 6)).square().mean().backward()
    attention, both = (target_modules(transformer, FAMILY.denoiser, each) for each in FAMILY.denoiser.lora_targets)
    assert (len(attention), len(both)) == (2 * 8, 2 * 10)
    gradients = [transformer.get_submodule(name).weight.grad for name in both]
    assert all(gradient is not None and bool(gradient.any()) for gradient in gradients)


def test_the_layout_has_every_linear_layer():
    for name, module in tiny_transformer("anima").named_modules():
        assert not isinstance(module, torch.nn.Linear) or rule_of(FAMILY.lora_files.layout, name) is not None, name


@pytest.mark.parametrize("form", ["diffusion_model.llm_adapter.blocks.0.mlp.0", "lora_unet_llm_adapter_blocks_0_mlp_0"])
def test_layers_of_the_text_conditioner_in_a_lora_are_named(form, tmp_path):
    """Of other programs, beside those of the transformer, which alone is read."""
    plain = random_lora(tiny_transformer("anima"), endings=("attn1.to_q",), component="transformer")
    tensors = kohya_tensors(plain, names_of(FAMILY))[0]
    down, up = torch.randn(4, 8), torch.randn(8, 4)
    if "." in form:
        read = {f"diffusion_model.blocks.0.self_attn.q_proj.lora_{half}.weight": torch.randn(8, 8) for half in "AB"}
        tensors = {**read, f"{form}.lora_A.weight": down, f"{form}.lora_B.weight": up}
    else:
        tensors |= {f"{form}.lora_down.weight": down, f"{form}.lora_up.weight": up, f"{form}.alpha": torch.tensor(4.0)}
    save_file(tensors, file := tmp_path / "other.safetensors")
    with pytest.raises(UsageError, match=r"has 1 layer of a text conditioner \(llm_adapter\), which are not") as why:
        read_adapter(file)
    assert "unknown parts" not in str(why.value)
    inspected = inspect_lora(file)
    assert [each.message for each in inspected.errors] == [each.message for each in why.value.problems]
    assert {each.why for each in clients(inspected)} == {"the file has errors"}


@pytest.mark.parametrize(
    ("path", "changes", "words"),
    [
        ("transformer/config.json", {"text_embed_dim": 32}, "text 32 wide"),
        ("text_conditioner/config.json", {"source_dim": 32}, "states 32 wide"),
        ("text_conditioner/config.json", {"min_sequence_length": 256}, "min_sequence_length is 256, must be 512"),
        ("transformer/config.json", {"max_size": ["128", 240]}, "three whole numbers are meant"),
        ("transformer/config.json", {"in_channels": 17}, "takes more than noisy latents"),
        ("transformer/config.json", {"img_context_dim_in": 8}, "takes more than noisy latents"),
    ],
)
def test_other_models_are_refused_by_name(model, tmp_path, path, changes, words):
    other = Path(shutil.copytree(model, tmp_path / "other"))
    config = json.loads((other / path).read_text("utf-8"))
    (other / path).write_text(json.dumps({**config, **changes}), encoding="utf-8")
    with pytest.raises(UsageError, match=words):
        FAMILY.describe(other)


def test_a_repository_of_a_hub_is_fetched_by_its_modular_index(model):
    index = json.loads((model / "modular_model_index.json").read_text("utf-8"))
    found = choose_files(files_in(model), index, weights=True, without_t5=False)
    assert found.lacking == ()
    assert {"modular_model_index.json", "t5_tokenizer/tokenizer.json", "text_conditioner/config.json"} <= {*found.small}
    parts = {name.partition("/")[0] for name in found.weights}
    assert parts == {"transformer", "vae", "text_encoder", "text_conditioner"}


def test_missing_parts_are_named(model, tmp_path):
    other = Path(shutil.copytree(model, tmp_path / "other"))
    shutil.rmtree(other / "t5_tokenizer")
    with pytest.raises(UsageError, match=r"t5_tokenizer/tokenizer\.json is missing"):
        FAMILY.describe(other)


def test_text_options_that_the_blocks_cannot_follow_are_refused(model):
    with pytest.raises(UsageError, match="at most 512 tokens"):
        FAMILY.reading(TextOptions(t5_tokens=600)).describe(model)
    with pytest.raises(UsageError, match="has no CLIP text encoder"):
        FAMILY.reading(TextOptions(clip_skip=2)).describe(model)
    encoded = FAMILY.reading(TextOptions(t5_tokens=20)).load_encoders(model, torch.float32, CPU).encode_text(CAPTIONS)
    assert encoded["embeds"].shape == (3, 512, 64)
    assert [int(row.any(-1).sum()) for row in encoded["embeds"]][1:] == [1, 20]
