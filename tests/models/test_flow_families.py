"""SD3 and FLUX.1 from files: text embeddings, latents and predictions equal those of diffusers' pipelines."""

from __future__ import annotations

import gc
import json
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from transformers import T5Config, T5EncoderModel

from lora_trainer.benchmarks.interleaved import freeze_garbage
from lora_trainer.core.errors import UsageError
from lora_trainer.data.buckets import Bucket
from lora_trainer.models.detection import detect_family
from lora_trainer.models.drawing import prompted, read_prompts
from lora_trainer.models.encoders import offloaded_text
from lora_trainer.models.families import FAMILIES, sd3
from lora_trainer.models.family import Family, TextOptions
from lora_trainer.models.flow_schedule import read_flow_schedule
from lora_trainer.models.published import public_architecture
from lora_trainer.models.quantization.stored_forms import WeightReader
from lora_trainer.models.t5 import read_t5_tokens
from lora_trainer.models.transformer import transformer_facts
from lora_trainer.run.inputs import refuse_large
from tests.lora_format.tiny import T5_WIDTH, t5_tokenizer, tiny_pipeline

CPU = torch.device("cpu")
CAPTIONS = ["a red ring on a blue background", "", "ring " * 300]
TOKENS = {"flux": 512, "flux-schnell": 256}
# One flavor of each family where the others share the code.
of_each_family = pytest.mark.parametrize("model", ["sd3", "flux"], indirect=True)


@pytest.fixture(
    scope="module",  # `tests/recipes/test_edit_pairs.py` has FLUX.1 Kontext's
    params=["sd3", "sd3-without-t5", "sd3.5", "flux", "flux-schnell"],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of each kind, which is named by it."""
    folder = tmp_path_factory.mktemp("models")
    tiny_pipeline(folder / "tokens", request.param).save_pretrained(folder / request.param, safe_serialization=True)
    return folder / request.param


def family_of(model: Path) -> Family:
    return FAMILIES[detect_family(model)]


def edit(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **values}), encoding="utf-8")


def changed(model: Path, target: Path, file: str, **values: object) -> Path:
    other = Path(shutil.copytree(model, target / "other"))
    edit(other / file, **values)
    return other


@cache
def diffusers_own(model: Path) -> Any:
    """diffusers' pipeline of a folder, read once; of one without T5 as its users load it."""
    nothing = {"text_encoder_3": None, "tokenizer_3": None} if model.name == "sd3-without-t5" else {}
    return DiffusionPipeline.from_pretrained(model, local_files_only=True, **nothing)


def encoded_by_diffusers(model: Path, captions: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    pipeline = diffusers_own(model)
    with torch.no_grad():
        if model.name.startswith("flux"):
            length = TOKENS[model.name]
            embeds, pooled, _ = pipeline.encode_prompt(captions, captions, device=CPU, max_sequence_length=length)
        else:
            args = (captions, captions, captions)
            embeds, _, pooled, _ = pipeline.encode_prompt(*args, device=CPU, do_classifier_free_guidance=False)
    return embeds, pooled


def test_text_is_encoded_as_diffusers_does(model):
    family = family_of(model)
    encoded = family.load_encoders(model, torch.float32, CPU).encode_text(CAPTIONS)
    embeds, pooled = encoded_by_diffusers(model, CAPTIONS)
    assert torch.equal(encoded["embeds"], embeds)
    assert torch.equal(encoded["pooled"], pooled)
    config = json.loads((model / "transformer" / "config.json").read_text(encoding="utf-8"))
    assert {name: tuple(value.shape[1:]) for name, value in encoded.items()} == dict(family.text.cond_shapes(config))


def test_text_lengths_and_layers_follow_the_settings(model):
    """As in diffusers. Each chunk, which diffusers does not support, is encoded as if alone."""
    family, settings = family_of(model), {"t5_tokens": 40}
    if model.name == "sd3-without-t5":
        with pytest.raises(UsageError, match="no T5"):
            family.reading(TextOptions(t5_tokens=40)).describe(model)
        settings = {}
    if not model.name.startswith("flux"):
        settings |= {"clip_skip": 2}
    bound = family.reading(TextOptions(**settings))
    cond, pipeline = bound.load_encoders(model, torch.float32, CPU).encode_text(CAPTIONS), diffusers_own(model)
    args = (CAPTIONS,) * (2 if model.name.startswith("flux") else 3)
    more = {} if model.name.startswith("flux") else {"do_classifier_free_guidance": False, "clip_skip": 0}
    length = settings.get("t5_tokens", 256)
    with torch.no_grad():
        wanted = pipeline.encode_prompt(*args, device=CPU, max_sequence_length=length, **more)[0]
    assert torch.equal(cond["embeds"], wanted)
    config = json.loads((model / "transformer" / "config.json").read_text(encoding="utf-8"))
    assert cond["embeds"].shape[1:] == bound.text.cond_shapes(config)["embeds"]
    if model.name.startswith("flux"):
        for wrong in ({"clip_skip": 1}, {"clip_tokens": 150}):
            with pytest.raises(UsageError, match="only a summary"):
                family.reading(TextOptions(**wrong)).describe(model)
        return
    plain = family.load_encoders(model, torch.float32, CPU).encode_text(CAPTIONS[:2])["embeds"]
    long = family.reading(TextOptions(clip_tokens=150))
    pieces = long.load_encoders(model, torch.float32, CPU).encode_text(CAPTIONS[:2])["embeds"]
    assert pieces.shape[1:] == long.text.cond_shapes(config)["embeds"]
    assert torch.equal(pieces[0], torch.cat([plain[0, :77], plain[1, :77], plain[0, 77:]]))


@pytest.mark.parametrize("model", ["sd3"], indirect=True)
def test_text_without_t5_is_no_longer_than_for_clip(model):
    family = family_of(model)
    assert family.describe(model).caption_tokens == 256
    assert family.reading(TextOptions(without=family.text.optional)).describe(model).caption_tokens == 77


def test_text_encoders_get_gradients_through_their_embeddings(model):
    family = family_of(model)
    parts = family.text.load(model, torch.float32, CPU)
    for name in parts.encoders:
        parts.encoders[name].requires_grad_(True)
    assert {*parts.encoders} <= {*family.text.targets}
    cond = family.text.encode(parts, ["a red ring"], TextOptions())
    sum(value.sum() for value in cond.values()).backward()
    for name in parts.encoders:
        assert any(each.grad is not None and each.grad.any() for each in parts.encoders[name].parameters()), name


def test_latents_have_the_scale_and_shift_of_the_vae(model):
    pixels = torch.rand(2, 3, 64, 96, generator=torch.manual_seed(0)) * 2 - 1
    mean, spread = family_of(model).load_encoders(model, torch.float32, CPU).encode_image(pixels)
    pipeline = diffusers_own(model)
    with torch.no_grad():
        distribution = pipeline.vae.encode(pixels).latent_dist
    # As the pipeline undoes it: latents / scaling_factor + shift_factor.
    assert torch.allclose(mean / 0.5 + 0.1, distribution.mean, atol=1e-5)
    assert torch.allclose(spread / 0.5, distribution.std, atol=1e-5)
    facts = family_of(model).describe(model)
    assert mean.shape == (2, facts.latent_channels, 64 // facts.downscale, 96 // facts.downscale)


@pytest.mark.parametrize(
    "size", [(48, 96), *(pytest.param(size, marks=pytest.mark.slow) for size in ((64, 64), (112, 32)))]
)
def test_the_denoiser_gets_the_same_inputs_as_in_the_pipeline(model, size):
    """At all timesteps: at the first, which is pure noise, no wrong time scale would show."""
    family = family_of(model)
    pipeline = family.pipeline.make(model, torch.float32, CPU)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    times: list[torch.Tensor] = []
    step = pipeline.scheduler.step

    def watch(module: torch.nn.Module, args: tuple[Any, ...], arguments: dict[str, Any], out: tuple[Any, ...]) -> None:
        seen.append((arguments["hidden_states"], out[0]))

    def watch_step(velocity: torch.Tensor, time: torch.Tensor, *args: Any, **arguments: Any) -> Any:
        times.append(time)
        return step(velocity, time, *args, **arguments)

    pipeline.transformer.register_forward_hook(watch, with_kwargs=True)
    pipeline.scheduler.step = watch_step
    width, height = size
    read = read_prompts(pipeline, family, ["a ring"])
    pipeline(
        **prompted(family, read, ["a ring"], None),
        num_inference_steps=3,
        generator=torch.manual_seed(0),
        output_type="latent",
        guidance_scale=1.0,
        width=width,
        height=height,
    )
    cond = family.load_encoders(model, torch.float32, CPU).encode_text(["a ring"])
    denoiser = family.denoiser.load(model, torch.float32, CPU)
    assert times[0] == 1000 > times[1] > times[2] > 0
    for time, (noisy, expected) in zip(times, seen, strict=True):
        if model.name.startswith("flux"):
            noisy, expected = (pipeline._unpack_latents(each, height, width, 8) for each in (noisy, expected))
        assert noisy.shape[-2:] == (height // 8, width // 8)
        with torch.no_grad():
            ours = family.denoiser.predict(denoiser, noisy, time[None] - 1, cond, torch.zeros(1, 6))
        assert torch.allclose(ours, expected, atol=1e-5)


@pytest.mark.parametrize("sides", [(8, 8), (6, 14), (256, 4)])
def test_the_cropped_position_table_equals_the_whole_one(sides, tmp_path):
    from diffusers import SD3Transformer2DModel

    tiny_pipeline(tmp_path / "tokens", "sd3.5").transformer.save_pretrained(tmp_path / "transformer")
    whole = SD3Transformer2DModel.from_pretrained(tmp_path / "transformer", local_files_only=True)
    cropped = sd3.load_transformer(tmp_path, torch.float32, CPU)
    assert cropped.pos_embed.pos_embed.shape[1] == 128 * 128 < whole.pos_embed.pos_embed.shape[1]
    noisy = torch.randn(1, 16, *sides, generator=torch.manual_seed(0))
    cond = {"embeds": torch.ones(1, 5, T5_WIDTH), "pooled": torch.ones(1, 28)}
    with torch.no_grad():
        predictions = [
            sd3.predict(each, noisy, torch.tensor([500]), cond, torch.zeros(1, 6)) for each in (cropped, whole)
        ]
    assert torch.equal(*predictions)


def test_the_whole_position_table_is_never_on_the_device(tmp_path, monkeypatch):
    tiny_pipeline(tmp_path / "tokens", "sd3.5").transformer.save_pretrained(tmp_path / "transformer")
    loaded, read = [], WeightReader.read

    def seen(reader: WeightReader, name: str, dtype: torch.dtype | None) -> torch.Tensor:
        loaded.append(read(reader, name, dtype))
        return loaded[-1]

    monkeypatch.setattr(WeightReader, "read", seen)
    sd3.load_transformer(tmp_path, torch.float32, CPU)
    assert [tuple(each.shape[:2]) for each in loaded if each.ndim == 3] == [(1, 128 * 128)]


def test_a_family_can_encode_captions_with_only_t5(tmp_path):
    tiny_pipeline(tmp_path / "tokens", "flux").save_pretrained(tmp_path / "flux")
    facts = transformer_facts(
        tmp_path / "flux", "x", clips=(), t5="text_encoder_2", t5_tokens=300, per_latent=4, side=128, variant=""
    )
    assert facts.caption_tokens == 300


def test_facts_and_names_distinguish_the_flavors(model):
    family = family_of(model)
    facts = family.describe(model)
    kinds = {"sd3": "medium", "sd3-without-t5": "medium", "sd3.5": "5-medium", "flux": "dev", "flux-schnell": "schnell"}
    assert facts.variant == kinds[model.name]
    assert facts.caption_tokens == {**TOKENS, "sd3-without-t5": 77}.get(model.name, 256)
    assert (facts.prediction, facts.pixel_step, facts.latent_channels) == ("flow", 16, 16)
    sides = {"sd3": 24 * 16, "sd3-without-t5": 24 * 16, "sd3.5": 128 * 16}  # of the table of positions
    assert facts.largest_side == sides.get(model.name)
    version, architecture = family.lora_files.base_names(facts)
    assert version in ("sd3", "flux1")
    assert architecture.endswith(f"-{facts.variant}/lora")


def test_t5_tokens_are_truncated_padded_and_weighted():
    tokenizer = t5_tokenizer()
    plain = read_t5_tokens(tokenizer, ["a red ring", "a " * 40], 8, CPU)
    theirs = tokenizer(
        ["a red ring", "a " * 40], padding="max_length", max_length=8, truncation=True, return_tensors="pt"
    )
    assert torch.equal(plain.ids, theirs.input_ids)
    weighed = read_t5_tokens(tokenizer, [(("a", 1.0), ("red ring", 2.0))], 8, CPU)
    assert torch.equal(weighed.ids, plain.ids[:1])
    assert weighed.weights[0].tolist() == [1, 2, 2, 1, 1, 1, 1, 1]


@of_each_family
@pytest.mark.parametrize(
    ("file", "values", "expected"),
    [
        ("transformer/config.json", {"in_channels": 384}, "takes more than noisy latents"),
        ("transformer/config.json", {"_class_name": "AuraFlowTransformer2DModel"}, "AuraFlowTransformer2DModel"),
        ("transformer/config.json", {"pooled_projection_dim": 7}, "7 wide"),
        ("transformer/config.json", {"joint_attention_dim": 7}, "takes text"),
        ("transformer/config.json", {"joint_attention_dim": "x"}, "takes text x|joint_attention_dim is 'x'"),
        ("text_encoder/config.json", {"hidden_size": None}, "encoders give None|hidden_size is None"),
        ("scheduler/scheduler_config.json", {"_class_name": "DDIMScheduler"}, "FlowMatchEulerDiscreteScheduler"),
        ("scheduler/scheduler_config.json", {"use_karras_sigmas": True}, "use_karras_sigmas"),
        ("scheduler/scheduler_config.json", {"shift": 0.0, "max_shift": "x"}, "max_shift"),
        ("vae/config.json", {"latents_mean": [0.0] * 16}, "latents_mean"),
    ],
)
def test_a_folder_without_a_base_model_of_the_family_is_refused(model, tmp_path, file, values, expected):
    other = changed(model, tmp_path, file, **values)
    with pytest.raises(UsageError, match=expected):
        family_of(other).describe(other)


@of_each_family
def test_a_t5_without_its_tokenizer_is_refused_with_where_to_get_it(model, tmp_path):
    other = Path(shutil.copytree(model, tmp_path / "other"))
    words = other / ("tokenizer_2" if model.name.startswith("flux") else "tokenizer_3")
    (words / "tokenizer.json").rename(words / "spiece.model")
    with pytest.raises(UsageError, match="sentencepiece") as refused:
        family_of(other).describe(other)
    assert "tokenizer.json" in refused.value.problems[0].fix


def test_the_schedule_is_that_of_the_scheduler(model):
    flow = read_flow_schedule(model)
    assert (flow.steps, flow.dynamic) == (1000, model.name == "flux")
    assert flow.shift == (3.0 if model.name.startswith("sd3") else 1.0)
    theirs = diffusers_own(model).scheduler
    ours = family_of(model).pipeline.make(model, torch.float32, CPU).scheduler
    for scheduler in (ours, theirs):
        scheduler.set_timesteps(5, mu=0.8 if flow.dynamic else None)
    assert torch.equal(ours.sigmas, theirs.sigmas)


def test_text_encoders_loaded_layer_by_layer_have_the_same_embeddings(model):
    family = family_of(model)
    whole = family.load_encoders(model, torch.float32, CPU).encode_text(CAPTIONS)
    visiting = offloaded_text(family.text, model, torch.float32, CPU)(CAPTIONS)
    assert all(torch.equal(whole[name], visiting[name]) for name in whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_text_encoders_loaded_layer_by_layer_keep_the_files_precision(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A T5 with 8.9 million weights, 35 MB in fp32: one layer at a time is loaded, and none is copied."""
    pipeline = tiny_pipeline(tmp_path / "tokens", "flux")
    sizes = {"d_model": 256, "d_kv": 32, "d_ff": 1024, "num_layers": 8, "num_heads": 8}
    torch.manual_seed(0)
    config = T5Config(vocab_size=len(pipeline.tokenizer_2), feed_forward_proj="gated-gelu", **sizes)
    pipeline.text_encoder_2 = T5EncoderModel(config)
    pipeline.to(torch.bfloat16).save_pretrained(tmp_path / "flux")
    del pipeline
    family, most, times = FAMILIES["flux"].reading(TextOptions(t5_tokens=64)), 0, 0
    whole = family.load_encoders(tmp_path / "flux", dtype, CPU).encode_text(CAPTIONS[:2])
    product = torch.nn.Linear.forward

    def watched(layer: torch.nn.Linear, inputs: torch.Tensor) -> torch.Tensor:
        nonlocal most, times
        times += 1
        if times % 10 == 0:
            most = max(most, sum(storages().values()))
        return product(layer, inputs)

    monkeypatch.setattr(torch.nn.Linear, "forward", watched)
    with freeze_garbage():  # what was there before is none of the objects that are looked through
        embeds = offloaded_text(family.text, tmp_path / "flux", dtype, CPU)(CAPTIONS[:2])
    file = tmp_path / "flux" / "text_encoder_2" / "model.safetensors"
    assert times > 50
    assert file.stat().st_size < most < 1.2 * file.stat().st_size
    assert {name: value.dtype for name, value in embeds.items()} == {name: value.dtype for name, value in whole.items()}
    assert all(torch.equal(whole[name], embeds[name]) for name in whole)


def storages() -> dict[int, int]:
    """Bytes of all live tensor storages by address. One mapped file counts once."""
    every = (
        each.untyped_storage()
        for each in gc.get_objects()
        if type(each) in (torch.Tensor, torch.nn.Parameter) and not each.is_meta  # other tests leave traced ones
    )
    return {each.data_ptr(): each.nbytes() for each in every}


def test_images_larger_than_the_position_table_are_refused_before_loading():
    facts = replace(public_architecture("sd3").facts, largest_side=2048)
    refuse_large(facts, [Bucket(2048, 512), Bucket(1024, 1024)])
    with pytest.raises(UsageError, match="2064 px") as refused:
        refuse_large(facts, [Bucket(512, 2064)])
    assert "data.bucket_max=2048" in refused.value.problems[0].fix
