"""Caption encoding: layers, chunks and lengths, compared with diffusers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CLIPTextModel, CLIPTextModelWithProjection

from lora_trainer.config.schema import Config
from lora_trainer.core.errors import UsageError
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.family import Encoders, TextOptions
from lora_trainer.models.published import public_architecture
from lora_trainer.models.unet import load_tokenizer
from lora_trainer.models.weighting import read_tokens
from lora_trainer.run.inputs import read_model
from lora_trainer.run.plans.plan import gauge_of
from tests.lora_format.tiny import text_config, tiny_pipeline

CPU = torch.device("cpu")
LAYERS = 4
OWN = {"sd15": 1, "sd2": 1, "sdxl": 2}
LONG = "a red ring on a blue field, a green square beside it, " * 30


def filled(tokenizer: Any, text: str) -> str:
    """The text, made 75 tokens long by the word `a`."""
    count = len(tokenizer(text, add_special_tokens=False).input_ids)
    whole = text + " a" * (75 - count)
    assert len(tokenizer(whole, add_special_tokens=False).input_ids) == 75
    return whole


@pytest.fixture(scope="module", params=["sd15", "sd2", "sdxl"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp(request.param)
    pipeline = tiny_pipeline(root / "tokens", request.param)
    width = pipeline.text_encoder.config.hidden_size
    pipeline.text_encoder = CLIPTextModel(text_config(pipeline.tokenizer, width, layers=LAYERS))
    if request.param == "sdxl":
        second = text_config(pipeline.tokenizer, 24, layers=LAYERS, projection_dim=16)
        pipeline.text_encoder_2 = CLIPTextModelWithProjection(second)
    pipeline.save_pretrained(root / request.param, safe_serialization=True)
    return root / request.param


def encoders(folder: Path, **options: Any) -> Encoders:
    return FAMILIES[folder.name].reading(TextOptions(**options)).load_encoders(folder, torch.float32, CPU)


def embeds_of_diffusers(folder: Path, prompt: str, clip_skip: int | None) -> torch.Tensor:
    pipeline = FAMILIES[folder.name].pipeline.make(folder, torch.float32, CPU)
    if folder.name != "sdxl":  # diffusers 0.42 looks for the norm where transformers had it before 5.6
        pipeline.text_encoder.__dict__["text_model"] = pipeline.text_encoder
    with torch.no_grad():
        embeds: torch.Tensor = pipeline.encode_prompt(
            prompt, device=CPU, num_images_per_prompt=1, do_classifier_free_guidance=False, clip_skip=clip_skip
        )[0]
    return embeds


def test_tokens_are_those_of_the_tokenizer(folder: Path) -> None:
    tokenizer = load_tokenizer(folder, "text_encoder")
    captions = ["a red ring", "", LONG]
    theirs = tokenizer(captions, padding="max_length", max_length=77, truncation=True, return_tensors="pt")
    assert torch.equal(read_tokens(tokenizer, captions, CPU).ids, theirs.input_ids)


def test_the_chosen_layer_is_that_of_diffusers(folder: Path) -> None:
    plain = encoders(folder).encode_text(["a red ring"])["embeds"]
    assert torch.equal(plain, embeds_of_diffusers(folder, "a red ring", None))
    own, seen = OWN[folder.name], []
    for layer in range(own, LAYERS + 1):
        embeds = encoders(folder, clip_skip=layer).encode_text(["a red ring"])["embeds"]
        skipped = layer - own
        torch.testing.assert_close(embeds, embeds_of_diffusers(folder, "a red ring", skipped), rtol=0, atol=1e-6)
        assert not any(torch.equal(embeds, other) for other in seen)
        seen.append(embeds)
    assert torch.equal(seen[0], plain)


def test_the_pooled_embedding_is_always_that_of_the_last_layer(folder: Path) -> None:
    if folder.name == "sdxl":
        plain = encoders(folder).encode_text(["a red ring"])["pooled"]
        assert torch.equal(encoders(folder, clip_skip=3).encode_text(["a red ring"])["pooled"], plain)


def test_too_large_a_clip_skip_is_refused_with_both_numbers(folder: Path) -> None:
    for settings in ({"clip_skip": LAYERS + 1}, {"max_sequence_length": 256}):
        config = Config.model_validate({"model": {"path": str(folder)}, "text_encoder": settings})
        with pytest.raises(UsageError) as refused:
            read_model(config)
        message = str(refused.value)
        assert ("5" in message and f"has {LAYERS} layers" in message) if "clip_skip" in settings else "no T5" in message
    with pytest.raises(UsageError, match="without_t5"):
        read_model(Config.model_validate({"model": {"path": str(folder), "without_t5": True}}))


def test_long_captions_are_encoded_in_chunks(folder: Path) -> None:
    """Each chunk is encoded alone, and the pooled embedding is the first one's, as in ComfyUI and A1111."""
    tokenizer = load_tokenizer(folder, "text_encoder")
    pieces = [filled(tokenizer, text) for text in ("a red ring on a blue field", "a green square", "a blue ring")]
    alone = encoders(folder).encode_text(pieces)
    cond = encoders(folder, clip_tokens=225).encode_text([" ".join((*pieces, "which is cut")), "a red ring"])
    assert cond["embeds"].shape[:2] == (2, 3 * 77)
    torch.testing.assert_close(cond["embeds"][0], alone["embeds"].flatten(0, 1))
    short = encoders(folder).encode_text(["a red ring", ""])["embeds"]
    torch.testing.assert_close(cond["embeds"][1], torch.cat([short[0], short[1], short[1]]))
    if "pooled" in cond:
        torch.testing.assert_close(cond["pooled"][0], alone["pooled"][0])
    family, config = FAMILIES[folder.name].reading(TextOptions(clip_tokens=225)), public_architecture(folder.name)
    assert family.text.cond_shapes(config.denoiser)["embeds"][0] == cond["embeds"].shape[1]


def test_prompt_weights_stay_with_their_tokens_across_chunks(folder: Path) -> None:
    """A token in the second chunk is weighted there, and the first chunk is unchanged."""
    tokenizer = load_tokenizer(folder, "text_encoder")
    first, second = filled(tokenizer, "a red ring on a blue field"), "a green square"
    weighted = ((first, 1.0), (" " + second, 1.3))
    embeds = encoders(folder, clip_tokens=150).encode_text([weighted])["embeds"][0]
    alone = encoders(folder).encode_text([first, ((second, 1.3),)])["embeds"]
    torch.testing.assert_close(embeds, alone.flatten(0, 1))


def test_caption_encoding_settings_are_part_of_the_key(folder: Path) -> None:
    family, keys = FAMILIES[folder.name], []
    for options in ({}, {"clip_skip": 2}, {"clip_skip": 3}, {"clip_tokens": 150}):
        image, text = family.reading(TextOptions(**options)).encoder_keys(folder, torch.float32)  # type: ignore[arg-type]
        assert image == family.encoder_keys(folder, torch.float32)[0]
        keys.append(text)
    assert len(set(keys)) == 4
    assert keys[0] == family.encoder_keys(folder, torch.float32)[1]


def test_facts_have_the_maximum_caption_length(folder: Path) -> None:
    def limit(**settings: Any) -> int:
        return read_model(Config.model_validate({"model": {"path": str(folder)}, "text_encoder": settings}))[
            1
        ].caption_tokens

    assert (limit(), limit(max_tokens=150), limit(max_tokens=225)) == (77, 152, 227)


def test_the_plan_of_a_published_model_follows_the_length_of_captions() -> None:
    from lora_trainer.memory_plan.profiles import Sizes

    architecture, sizes = public_architecture("sd15"), Sizes(rank=16, micro=4, area=64 * 64, checkpointed=0)
    family, config = FAMILIES["sd15"], Config()
    plain = gauge_of(family, architecture, config).footprint(sizes, "bf16")
    long = gauge_of(family.reading(TextOptions(clip_tokens=225)), architecture, config).footprint(sizes, "bf16")
    assert plain.activations < long.activations < 1.2 * plain.activations


def test_the_plan_without_t5_is_that_of_the_stored_profile() -> None:
    """Zeros replace it, so that no size of a step changes, and nothing is traced."""
    family, architecture = FAMILIES["sd3"], public_architecture("sd3")
    for text in (TextOptions(without=family.text.optional), TextOptions(without=family.text.optional, clip_skip=3)):
        assert family.reading(text).text.cond_shapes(architecture.denoiser) == family.text.cond_shapes(
            architecture.denoiser
        )
        assert not gauge_of(family.reading(text), architecture, Config()).traced
