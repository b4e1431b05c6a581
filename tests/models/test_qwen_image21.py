"""Qwen-Image 2.1 from files: text embeddings, predictions and images of its pipeline, names in LoRA files."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import QwenImage21Pipeline, QwenImage21Transformer2DModel
from safetensors.torch import save_file

from lora_trainer.adapters.base import AdapterOptions
from lora_trainer.adapters.lora import inject_lora
from lora_trainer.adapters.target_modules import target_modules
from lora_trainer.core.errors import UsageError
from lora_trainer.data.images.images import to_rgb
from lora_trainer.diffusion.timesteps import Shift
from lora_trainer.evaluation.recipe import Drawing, ImageRequest
from lora_trainer.evaluation.sample import draw
from lora_trainer.lora_format.diffusers import diffusers_tensors
from lora_trainer.lora_format.kohya import kohya_tensors
from lora_trainer.lora_format.layouts import rule_of
from lora_trainer.models.autoencoder import image_decoder, load_vae
from lora_trainer.models.detection import detect_family
from lora_trainer.models.drawing import read_prompts
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.lora_clients import clients
from lora_trainer.models.lora_names import inspect_lora, names_of
from lora_trainer.models.memory.block_swap import swap_blocks
from lora_trainer.models.memory.checkpointing import checkpoint_blocks
from tests.lora_format.tiny import WholeReader, qwen_tokenizer, random_lora, tiny_pipeline, tiny_transformer

CPU = torch.device("cpu")
FAMILY = FAMILIES["qwen_image21"]
CAPTIONS = ["a red ring on a blue background", "", "ring " * 60]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_pipeline(folder / "tokens", "qwen_image21").save_pretrained(folder / "model", safe_serialization=True)
    return folder / "model"


@pytest.fixture(scope="module")
def turbo(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(shutil.copytree(model, tmp_path_factory.mktemp("turbo") / "model"))
    edit(folder / "model_index.json", sample_sigmas=[1.0, 0.6, 0.2])
    return folder


@pytest.fixture(scope="module")
def theirs(model: Path) -> Any:
    """diffusers' own, with the whole text encoder and its own forward pass."""
    return whole(model)


def whole(model: Path) -> Any:
    reader = WholeReader(qwen_tokenizer())
    pipeline = QwenImage21Pipeline.from_pretrained(model, processor=reader, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def edit(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), **values}), encoding="utf-8")


def test_the_family_is_recognized_by_its_pipeline_and_described(model, turbo):
    assert detect_family(model) == detect_family(turbo) == "qwen_image21"
    facts = FAMILY.describe(model)
    assert (facts.prediction, facts.latent_channels, facts.downscale, facts.pixel_step) == ("flow", 64, 16, 32)
    assert (facts.resolution, facts.caption_tokens, facts.variant, facts.distilled_from) == (1024, 512, "", "")
    assert (FAMILY.describe(turbo).variant, FAMILY.describe(turbo).distilled_from) == ("turbo", "Qwen-Image 2.1")
    shift = FAMILY.denoiser.make_process(model).times.shift  # of the pipeline's tokens, each of one latent
    assert shift == Shift(1.0, True, (256, 8192), (0.5, 0.9), patch=1)
    assert shift.of((64, 64)) == pytest.approx(math.exp(0.5 + 0.4 * (64 * 64 - 256) / (8192 - 256)))
    assert [FAMILY.pipeline.sampling_defaults(folder).steps for folder in (model, turbo)] == [40, 3]


def test_text_is_encoded_as_the_pipeline_does(model, theirs):
    encoded = FAMILY.load_encoders(model, torch.float32, CPU).encode_text(CAPTIONS)
    with torch.no_grad():
        expected, masks, _ = theirs.encode_prompt(list(CAPTIONS))
    assert encoded["padding"].dtype == torch.bool
    for embeds, padding, states, mask in zip(encoded["embeds"], encoded["padding"], expected, masks, strict=True):
        assert torch.allclose(embeds[~padding], states[mask.bool()], atol=1e-5)
        assert not embeds[padding].any()


def test_long_captions_keep_the_end_of_the_template(model):
    tokenizer = qwen_tokenizer()
    parts = FAMILY.text.load(model, torch.float32, CPU)
    seen: list[Any] = []
    hook = parts.encoders["text_encoder"].register_forward_pre_hook(
        lambda _, args, named: seen.append(named), with_kwargs=True
    )
    FAMILY.text.encode(parts, ["ring " * 300], FAMILY.text.options)
    hook.remove()
    assert tokenizer.decode(seen[0]["input_ids"][0]).endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_latents_are_the_pipelines_and_images_opaque(model, theirs):
    pixels = torch.rand(2, 3, 64, 96, generator=torch.manual_seed(0)) * 2 - 1
    mean, spread = FAMILY.load_encoders(model, torch.float32, CPU).encode_image(pixels)
    assert mean.shape == spread.shape == (2, 64, 4, 6)
    opaque = torch.cat([pixels, torch.ones(2, 1, 64, 96)], dim=1)
    with torch.no_grad():
        assert torch.allclose(mean, theirs._encode_vae_image(opaque.unsqueeze(2), None).squeeze(2), atol=1e-4)
    vae = load_vae(model, torch.float32, CPU)
    scale, shift = (torch.tensor(vae.config[key]).view(1, 64, 1, 1) for key in ("latents_std", "latents_mean"))
    with torch.no_grad():
        shown = vae.decode((mean * scale + shift).unsqueeze(2)).sample.squeeze(2)
    colors, alpha = shown[:, :3], (shown[:, 3:] + 1) / 2
    decoded = image_decoder(vae, CPU)(mean)
    assert torch.allclose(decoded, colors * alpha + 1 - alpha, atol=1e-4)


@pytest.mark.parametrize("size", [(64, 64), (96, 64)])
def test_the_denoiser_gets_the_same_inputs_as_in_the_pipeline(model, theirs, size):
    calls: list[dict[str, Any]] = []
    watched = theirs.transformer.register_forward_hook(
        lambda module, args, named, output: calls.append({**named, "output": output[0]}), with_kwargs=True
    )
    arguments = {"num_inference_steps": 3, "output_type": "latent", "use_kv_cache": False}
    theirs("a ring", width=size[0], height=size[1], generator=torch.manual_seed(0), **arguments)
    watched.remove()
    cond = FAMILY.load_encoders(model, torch.float32, CPU).encode_text(["a ring"])
    transformer = FAMILY.denoiser.load(model, torch.float32, CPU)
    assert float(calls[0]["timestep"]) == 1.0 > float(calls[1]["timestep"]) > float(calls[2]["timestep"]) > 0.0
    for call in calls:
        tokens, rows, columns = call["hidden_states"], size[1] // 16, size[0] // 16
        noisy = tokens.transpose(1, 2).reshape(1, 64, rows, columns)
        with torch.no_grad():
            found = FAMILY.denoiser.predict(transformer, noisy, call["timestep"] * 1000 - 1, cond, torch.zeros(1, 6))
        expected = call["output"][:, -rows * columns :].transpose(1, 2).reshape(noisy.shape)
        assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
def test_the_forward_pass_and_its_gradients_are_diffusers_own(causal):
    torch.manual_seed(0)
    config = {**tiny_transformer("qwen_image21").config, "causal_condition": causal}
    usual = QwenImage21Transformer2DModel.from_config(config).double()
    ours = FAMILY.denoiser.make(config).double()
    ours.load_state_dict(usual.state_dict())
    image, text = torch.randn(2, 24, 64, dtype=torch.float64), torch.randn(2, 7, 64, dtype=torch.float64)
    inputs = {"hidden_states": image, "encoder_hidden_states": text, "img_shapes": [[(1, 6, 4)]] * 2}
    inputs |= {"timestep": torch.tensor([0.1, 0.7], dtype=torch.float64)}
    mask = torch.arange(7 + 6).repeat(2, 1) >= 7
    found = []
    for model, checkpointed in ((usual, False), (ours, False), (ours, True)):
        model.zero_grad()
        if checkpointed:
            model.enable_gradient_checkpointing()
        answer = model(**inputs, img_mask=mask, return_dict=False)[0]
        answer.square().sum().backward()
        found.append([answer, *(each.grad for each in model.parameters())])
    for other in found[1:]:
        # Times are embedded in fp32.
        assert all(torch.allclose(one, two, rtol=1e-5, atol=1e-8) for one, two in zip(found[0], other, strict=True))


def test_in_bf16_times_are_exact_where_diffusers_rounds_them():
    torch.manual_seed(0)
    usual = QwenImage21Transformer2DModel.from_config(tiny_transformer("qwen_image21").config).bfloat16()
    ours = FAMILY.denoiser.make(usual.config).bfloat16()
    ours.load_state_dict(usual.state_dict())
    image, text = torch.randn(1, 24, 64).bfloat16(), torch.randn(1, 7, 64).bfloat16()
    inputs = {"hidden_states": image, "encoder_hidden_states": text, "img_shapes": [[(1, 6, 4)]], "return_dict": False}
    inputs["img_mask"] = torch.arange(7 + 6)[None] >= 7
    with torch.no_grad():
        rounded = usual(**inputs, timestep=torch.tensor([0.999]))[0]
        assert torch.equal(ours(**inputs, timestep=torch.tensor([1.0]))[0], rounded)
        assert not torch.equal(ours(**inputs, timestep=torch.tensor([0.999]))[0], rounded)


def test_captions_of_different_lengths_do_not_affect_each_other(model):
    transformer = FAMILY.denoiser.load(model, torch.float32, CPU)
    cond = FAMILY.load_encoders(model, torch.float32, CPU).encode_text([*CAPTIONS, CAPTIONS[0]])
    noisy, t = torch.randn(4, 64, 4, 6, generator=torch.manual_seed(0)), torch.tensor([10, 500, 999, 70])
    with torch.no_grad():
        together = FAMILY.denoiser.predict(transformer, noisy, t, cond, torch.zeros(4, 6))
        for row in range(4):
            own = {name: value[row : row + 1] for name, value in cond.items()}
            alone = FAMILY.denoiser.predict(transformer, noisy[row : row + 1], t[row : row + 1], own, torch.zeros(1, 6))
            assert torch.allclose(together[row : row + 1], alone, atol=1e-5)


@pytest.mark.parametrize("checkpointed", [0, 2])
def test_blocks_are_swapped_while_captions_of_other_lengths_are_calls_of_their_own(model, checkpointed):
    """One backward pass follows two forward passes."""
    cond = FAMILY.load_encoders(model, torch.float32, CPU).encode_text(CAPTIONS)
    noisy, t = torch.randn(3, 64, 4, 6, generator=torch.manual_seed(0)), torch.tensor([10, 500, 999])
    denoiser = FAMILY.denoiser.load(model, torch.float32, CPU).train()
    names = target_modules(denoiser, FAMILY.denoiser, "attention+ff")
    trained = list(inject_lora(denoiser, names, AdapterOptions(4, 4.0), 0).values())
    for each in trained:
        torch.nn.init.normal_(each, std=0.1)
    found = []
    for swapped in (0, 2):
        checkpoint_blocks(denoiser, checkpointed)
        swap_blocks(denoiser, swapped, CPU)
        answer = FAMILY.denoiser.predict(denoiser, noisy, t, cond, torch.zeros(3, 6))
        found.append([answer, *torch.autograd.grad(answer.square().mean(), trained)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_images_are_the_pipelines_own(model, theirs, guidance):
    images_are_equal(model, theirs, guidance)


def test_turbo_takes_the_steps_that_it_ships(turbo):
    images_are_equal(turbo, whole(turbo), None)


def images_are_equal(model: Path, theirs: Any, guidance: float | None) -> None:
    """Prompts of other lengths each by itself; what is not opaque is shown on white."""
    prompts, sizes = ["a red ring", "a blue ring on a green background"], {"width": 96, "height": 64}
    steps = {} if guidance is None else {"num_inference_steps": 3, "true_cfg_scale": guidance}
    negative = {"negative_prompt": "blue"} if guidance and guidance > 1 else {}
    expected = [
        theirs(prompt, generator=torch.Generator("cpu").manual_seed(seed), **steps, **negative, **sizes).images[0]
        for prompt, seed in zip(prompts, (3, 4), strict=True)
    ]
    assert expected[0].mode == "RGBA"
    pipeline = FAMILY.pipeline.make(model, torch.float32, CPU)
    read = read_prompts(pipeline, FAMILY, [*prompts, "blue"])
    rows = [ImageRequest(prompt, seed) for prompt, seed in zip(prompts, (3, 4), strict=True)]
    drawing = Drawing(
        steps=3, guidance=guidance, size=(96, 64), negative="blue" if negative else None, strengths=(1.0,)
    )
    for image, other in zip(draw(pipeline, FAMILY, read, rows, drawing), expected, strict=True):
        assert image.mode == "RGB"
        one, two = (torch.frombuffer(bytearray(each.tobytes()), dtype=torch.uint8) for each in (image, to_rgb(other)))
        assert (one.int() - two.int()).abs().max() <= 1


def test_targets_are_the_layers_of_all_blocks(model):
    denoiser = FAMILY.denoiser.load(model, torch.float32, CPU)
    attention, both = (target_modules(denoiser, FAMILY.denoiser, each) for each in FAMILY.denoiser.lora_targets)
    assert len(attention) == 2 * 4
    assert set(both) - set(attention) == {
        f"transformer_blocks.{n}.img_mlp.{name}" for n in (0, 1) for name in ("gate_layer", "proj", "out")
    }


def test_the_layout_has_every_layer():
    for name in tiny_transformer("qwen_image21").state_dict():
        assert rule_of(FAMILY.lora_files.layout, name.removesuffix(".weight")) is not None, name


def layers_of(kind: str) -> tuple[str, ...]:
    return tuple(name for name, each in tiny_transformer(kind).named_modules() if hasattr(each, "in_features"))


def test_kohyas_format_has_comfyuis_names():
    """Gate and up as one layer, the gate's rows first, as musubi-tuner trains it."""
    lora = random_lora(tiny_transformer("qwen_image21"), endings=layers_of("qwen_image21"), component="transformer")
    tensors, _ = kohya_tensors(lora, names_of(FAMILY))
    names = {name.partition(".")[0] for name in tensors}
    block = "lora_unet_transformer_blocks_1"
    assert {name for name in names if name.startswith(block)} == {
        f"{block}_{name}"
        for name in ("attn_to_q", "attn_to_k", "attn_to_v", "attn_to_out_0", "img_mlp_gate_up", "img_mlp_out")
    }
    assert {name for name in names if "blocks" not in name} == {
        f"lora_unet_{name}"
        for name in ("img_in", "txt_in_in_layer", "txt_in_out_layer", "modulation_1", "norm_out_linear", "proj_out")
    } | {f"lora_unet_time_text_embed_timestep_embedder_linear_{number}" for number in (1, 2)}
    fused = f"{block}_img_mlp_gate_up"
    down, up, alpha = (tensors[f"{fused}.{part}"] for part in ("lora_down.weight", "lora_up.weight", "alpha"))
    parts = [lora.modules[f"transformer.transformer_blocks.1.img_mlp.{name}"] for name in ("gate_layer", "proj")]
    expected = torch.cat([pair.up @ pair.down * pair.scale for pair in parts])
    assert torch.allclose(up @ down * alpha / len(down), expected, atol=1e-5)


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys")
def test_diffusers_reads_all_but_the_fused_layers_by_other_programs_names(tmp_path):
    """Its own names are read whole, behind `diffusion_model.` too."""
    endings = ("to_q", "to_out.0", "gate_layer", "proj", "out")
    blocks = tuple(name for name in layers_of("qwen_image21") if "blocks" in name and name.endswith(endings))
    lora = random_lora(tiny_transformer("qwen_image21"), alpha=4.0, endings=blocks, component="transformer")
    kohya, _ = kohya_tensors(lora, names_of(FAMILY))
    own = diffusers_tensors(lora)
    renamed = {name.replace("transformer.", "diffusion_model.", 1): each for name, each in own.items()}
    pipeline = tiny_pipeline(tmp_path, "qwen_image21")
    for tensors, whole in ((kohya, False), (own, True), (renamed, True)):
        file = tmp_path / "a.safetensors"
        save_file(tensors, file, metadata={"ss_base_model_version": "qwen_image21"})
        pipeline.load_lora_weights(str(tmp_path), weight_name=file.name)
        changed = {}
        for name, part in pipeline.transformer.named_modules():
            if hasattr(part, "lora_A"):
                changed[f"transformer.{name}"] = part.get_delta_weight(next(iter(part.scaling)))
        skipped = {name for name in lora.modules if name.endswith(("gate_layer", "proj"))}
        assert changed.keys() == lora.modules.keys() - (set() if whole else skipped)
        assert all(torch.allclose(each, lora.modules[name].delta(), atol=1e-5) for name, each in changed.items())
        read = {each.name: each.reads for each in clients(inspect_lora(file))}
        assert (read["diffusers"], read["ComfyUI"]) == (
            "whole" if whole else "in part",
            "not" if tensors is renamed else "whole",
        )
        pipeline.unload_lora_weights()


@pytest.mark.parametrize(
    ("path", "changes", "words"),
    [
        ("transformer/config.json", {"context_in_dim": 32}, "text 32 wide"),
        ("transformer/config.json", {"in_channels": 16}, "16 channels in patches of 1, in place of 64"),
        ("transformer/config.json", {"patch_size": 2}, "in patches of 2"),
        ("vae/config.json", {"latents_mean": [0.0]}, "latents_mean has 1 usable numbers; 64 are needed"),
        ("vae/config.json", {"_class_name": "AutoencoderKLQwenImage"}, "not an AutoencoderKLQwenImage21"),
        ("model_index.json", {"sample_sigmas": [2.0]}, "sample_sigmas is .2.0."),
    ],
)
def test_other_models_are_refused_by_name(model, tmp_path, path, changes, words):
    other = Path(shutil.copytree(model, tmp_path / "other"))
    edit(other / path, **changes)
    with pytest.raises(UsageError, match=words):
        FAMILY.describe(other)
