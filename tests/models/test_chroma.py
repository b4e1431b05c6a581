"""Chroma from files: text embeddings and predictions of its pipeline, masks, and original key names."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import ChromaPipeline
from diffusers.loaders.single_file_utils import convert_chroma_transformer_checkpoint_to_diffusers

from lora_trainer.adapters.base import AdapterOptions
from lora_trainer.adapters.lora import inject_lora
from lora_trainer.core.errors import UsageError
from lora_trainer.diffusion.timesteps import Shift
from lora_trainer.lora_format.kohya import kohya_tensors
from lora_trainer.lora_format.weights import LoraWeights
from lora_trainer.models.attention.backends import set_attention_backend
from lora_trainer.models.detection import detect_family
from lora_trainer.models.drawing import prompted, read_prompts
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.family import TextOptions
from lora_trainer.models.lora_names import names_of
from lora_trainer.models.memory.checkpointing import checkpoint_blocks
from lora_trainer.models.published import public_architecture
from tests.lora_format.tiny import random_lora, tiny_pipeline
from tests.models.single.originals import chroma_original

CPU = torch.device("cpu")
FAMILY = FAMILIES["chroma"]
CAPTIONS = ["a red ring on a blue background", "", "ring " * 600]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_pipeline(folder / "tokens", "chroma").save_pretrained(folder / "chroma", safe_serialization=True)
    return folder / "chroma"


def test_the_family_is_recognized_by_its_pipeline_and_described(model, tmp_path):
    assert detect_family(model) == "chroma"
    facts = FAMILY.describe(model)
    assert (facts.prediction, facts.pixel_step, facts.latent_channels, facts.caption_tokens) == ("flow", 16, 16, 512)
    assert FAMILY.pipeline.sampling_defaults(model).steps == 35
    other = Path(shutil.copytree(model, tmp_path / "other"))
    scheduler = other / "scheduler" / "scheduler_config.json"
    config = json.loads(scheduler.read_text("utf-8"))
    scheduler.write_text(json.dumps(config | {"use_beta_sigmas": True}), encoding="utf-8")
    assert FAMILY.denoiser.make_process(other).times.shift == Shift(1.0), "it spaces the steps of sampling alone"
    with pytest.raises(UsageError, match="Chroma has no CLIP"):
        FAMILY.reading(TextOptions(clip_skip=2)).describe(model)


def test_text_is_encoded_as_the_pipeline_does(model):
    encoded = FAMILY.load_encoders(model, torch.float32, CPU).encode_text(CAPTIONS)
    with torch.no_grad():
        pipeline = ChromaPipeline.from_pretrained(model, local_files_only=True)
        embeds, _, mask, *_ = pipeline.encode_prompt(list(CAPTIONS), do_classifier_free_guidance=False)
    assert encoded["padding"].dtype == torch.bool
    assert torch.equal(~encoded["padding"], mask.bool())
    assert torch.equal(encoded["embeds"], embeds)
    assert (~encoded["padding"]).sum(1).tolist()[1:] == [2, 512], "the end and one token of padding; all that fit"


@pytest.mark.parametrize("size", [(64, 64), (96, 48)])
def test_the_denoiser_gets_the_same_inputs_as_in_the_pipeline(model, size):
    """Of a pipeline with bool masks: for its own of ones and zeros it adds them to the scores, and padding counts."""
    pipeline = FAMILY.pipeline.make(model, torch.float32, CPU)
    calls: list[dict[str, Any]] = []
    answers: list[torch.Tensor] = []
    pipeline.transformer.register_forward_pre_hook(lambda _, args, named: calls.append(named), with_kwargs=True)
    pipeline.transformer.register_forward_hook(lambda _, args, answer: answers.append(answer[0]))
    with torch.no_grad():
        read = read_prompts(pipeline, FAMILY, ["a ring", "blue"], CPU)
    arguments = {"num_inference_steps": 3, "guidance_scale": 3.0, "output_type": "latent"}
    prompts = prompted(FAMILY, read, ["a ring"], "blue")
    assert prompts["prompt_attention_mask"].dtype == prompts["negative_prompt_attention_mask"].dtype == torch.bool
    pipeline(**prompts, width=size[0], height=size[1], generator=torch.manual_seed(0), **arguments)
    transformer = FAMILY.denoiser.load(model, torch.float32, CPU)
    height, width = size[1] // 8, size[0] // 8
    times = [float(call["timestep"][0]) for call in calls[::2]]
    assert times[0] == 1 > times[1] > times[2] > 0
    for place, (call, answer) in enumerate(zip(calls, answers, strict=True)):
        cond = read[("a ring", "blue")[place % 2]]
        latents, expected = (
            ChromaPipeline._unpack_latents(each, 8 * height, 8 * width, 8) for each in (call["hidden_states"], answer)
        )
        with torch.no_grad():
            ours = FAMILY.denoiser.predict(transformer, latents, 1000 * call["timestep"] - 1, cond, torch.zeros(1, 6))
        assert torch.allclose(ours, expected, atol=1e-5)


def test_padding_and_other_captions_change_nothing(model):
    transformer = FAMILY.denoiser.load(model, torch.float32, CPU)
    cond = FAMILY.load_encoders(model, torch.float32, CPU).encode_text(CAPTIONS)
    noisy, t = torch.randn(3, 16, 8, 12, generator=torch.manual_seed(0)), torch.tensor([10, 500, 999])
    other = {**cond, "embeds": cond["embeds"] + cond["padding"][..., None] * torch.randn_like(cond["embeds"])}
    with torch.no_grad():
        together = FAMILY.denoiser.predict(transformer, noisy, t, cond, torch.zeros(3, 6))
        assert torch.equal(FAMILY.denoiser.predict(transformer, noisy, t, other, torch.zeros(3, 6)), together)
        set_attention_backend(transformer, "math")
        again = FAMILY.denoiser.predict(transformer, noisy, t, cond, torch.zeros(3, 6))
        assert torch.allclose(again, together, atol=1e-6), "with a mask torch's own choice computes"
        for row in range(3):
            own = {name: value[row : row + 1] for name, value in cond.items()}
            alone = FAMILY.denoiser.predict(transformer, noisy[row : row + 1], t[row : row + 1], own, torch.zeros(1, 6))
            assert torch.allclose(together[row : row + 1], alone, atol=1e-5)


@pytest.mark.exact
def test_gradient_checkpointing_keeps_the_mask_bit_for_bit(model):
    """diffusers' own drops it in single blocks, so that a LoRA would learn from other predictions than it makes."""
    cond = FAMILY.load_encoders(model, torch.float32, CPU).encode_text(CAPTIONS[:2])
    noisy, t = torch.randn(2, 16, 8, 12, generator=torch.manual_seed(0)), torch.tensor([10, 500])
    found = []
    for count in (0, 1, 4):
        transformer = FAMILY.denoiser.load(model, torch.float32, CPU)
        learned = inject_lora(
            transformer, ["single_transformer_blocks.0.attn.to_q", "x_embedder"], AdapterOptions(2, 2.0), 0
        )
        transformer.train()
        checkpoint_blocks(transformer, count)
        velocity = FAMILY.denoiser.predict(transformer, noisy, t, cond, torch.zeros(2, 6))
        velocity.square().sum().backward()
        found.append([velocity.detach(), *(parameter.grad for parameter in learned.values())])
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))


def test_times_are_exact_in_half_precision(model):
    transformer = FAMILY.denoiser.load(model, torch.bfloat16, CPU)
    embedded: list[torch.Tensor] = []
    transformer.time_text_embed.time_proj.register_forward_hook(lambda _, given, answer: embedded.append(given[0]))
    cond = {"embeds": torch.zeros(1, 4, 64, dtype=torch.bfloat16), "padding": torch.zeros(1, 4, dtype=torch.bool)}
    with torch.no_grad():
        FAMILY.denoiser.predict(
            transformer, torch.zeros(1, 16, 4, 4, dtype=torch.bfloat16), torch.tensor([996]), cond, torch.zeros(1, 6)
        )
    assert [each.tolist() for each in embedded] == [[997.0]]


def published_width() -> torch.nn.Module:
    """One block of each kind, of the width that diffusers' conversions take for granted, without weights."""
    config = {**public_architecture("chroma").denoiser, "num_layers": 1, "num_single_layers": 1}
    with torch.device("meta"):
        return FAMILY.denoiser.make(config | {"approximator_layers": 2})


def test_the_layout_has_every_module_as_in_diffusers_converter():
    transformer = published_width()
    weights = transformer.state_dict()
    back = convert_chroma_transformer_checkpoint_to_diffusers(chroma_original(transformer))
    assert {name: each.shape for name, each in back.items()} == {name: each.shape for name, each in weights.items()}


def test_diffusers_reads_every_layer_of_the_kohya_format():
    """Fused in the file, and split again by the loader; alpha differs from the rank."""
    endings = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "net.2", "proj_mlp", "blocks.0.proj_out")
    plain = random_lora(published_width(), rank=2, alpha=1.0, endings=endings)
    ours = {f"transformer.{name.partition('.')[2]}": pair for name, pair in plain.modules.items()}
    tensors, _ = kohya_tensors(LoraWeights(ours), names_of(FAMILY))
    assert "lora_unet_single_blocks_0_linear1.lora_down.weight" in tensors
    read = ChromaPipeline.lora_state_dict(dict(tensors))
    for name, pair in ours.items():
        values = torch.randn(pair.down.shape[1], generator=torch.manual_seed(0))
        change = read[f"{name}.lora_B.weight"] @ (read[f"{name}.lora_A.weight"] @ values)
        assert torch.allclose(change, pair.up @ (pair.down @ values) * 0.5, atol=1e-4)
