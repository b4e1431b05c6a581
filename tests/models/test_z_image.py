"""Z-Image from files: text embeddings and predictions of its pipeline, and original key names."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import ZImagePipeline
from diffusers.loaders.single_file_utils import convert_z_image_transformer_checkpoint_to_diffusers

from lora_trainer.adapters.base import AdapterOptions
from lora_trainer.adapters.lora import inject_lora
from lora_trainer.core.errors import UsageError
from lora_trainer.diffusion.timesteps import Shift
from lora_trainer.lora_format.kohya import kohya_tensors
from lora_trainer.lora_format.layouts import Names, rule_of
from lora_trainer.lora_format.weights import LoraWeights
from lora_trainer.models.detection import detect_family
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.families.z_image import LAYOUT
from lora_trainer.models.quantization.store import is_narrow, make_quantizer
from lora_trainer.models.qwen3 import read_chat
from tests.lora_format.tiny import qwen_tokenizer, random_lora, tiny_pipeline, tiny_transformer

CPU = torch.device("cpu")
FAMILY = FAMILIES["z_image"]
CAPTIONS = ["a red ring on a blue background", "", "ring " * 300]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_pipeline(folder / "tokens", "z_image").save_pretrained(folder / "z", safe_serialization=True)
    return folder / "z"


def test_the_family_is_recognized_by_its_pipeline_and_described(model):
    assert detect_family(model) == "z_image"
    facts = FAMILY.describe(model)
    assert (facts.prediction, facts.pixel_step, facts.latent_channels, facts.caption_tokens) == ("flow", 16, 16, 512)
    assert FAMILY.denoiser.make_process(model).times.shift == Shift(3.0)


def test_text_is_encoded_as_the_pipeline_does(model):
    encoded = FAMILY.load_encoders(model, torch.float32, CPU).encode_text(CAPTIONS)
    with torch.no_grad():
        theirs, _ = ZImagePipeline.from_pretrained(model, local_files_only=True).encode_prompt(
            list(CAPTIONS), do_classifier_free_guidance=False
        )
    assert encoded["padding"].dtype == torch.bool
    for embeds, padding, expected in zip(encoded["embeds"], encoded["padding"], theirs, strict=True):
        assert torch.equal(embeds[~padding], expected)
        assert not embeds[padding].any()
    assert int(encoded["padding"][2].sum()) == 0, "what is longer is cut"


def test_prompt_weights_do_not_apply_to_the_chat_template():
    tokenizer = qwen_tokenizer()
    plain, here = read_chat(tokenizer, ["a red ring"], 64, CPU, thinking=True)
    weighed, same = read_chat(tokenizer, [(("a ", 1.0), ("red ring", 2.0))], 64, CPU, thinking=True)
    assert torch.equal(weighed.ids, plain.ids)
    assert torch.equal(here, same)
    assert plain.weights == (None,)
    heavy = weighed.ids[0][weighed.weights[0] == 2.0]
    assert tokenizer.decode(heavy) == "red ring"


@pytest.mark.parametrize("size", [(64, 64), (96, 48)])
def test_the_denoiser_gets_the_same_inputs_as_in_the_pipeline(model, size):
    pipeline = FAMILY.pipeline.make(model, torch.float32, CPU)
    calls: list[torch.Tensor] = []
    targets: list[torch.Tensor] = []
    times: list[torch.Tensor] = []
    step = pipeline.scheduler.step

    def watch(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        calls.append(torch.stack(args[0]).squeeze(2))

    def watch_step(velocity: torch.Tensor, time: torch.Tensor, *args: Any, **arguments: Any) -> Any:
        targets.append(velocity)
        times.append(time)
        return step(velocity, time, *args, **arguments)

    pipeline.transformer.register_forward_pre_hook(watch)
    pipeline.scheduler.step = watch_step
    arguments = {"num_inference_steps": 3, "guidance_scale": 0.0, "output_type": "latent"}
    pipeline("a ring", width=size[0], height=size[1], generator=torch.manual_seed(0), **arguments)
    cond = FAMILY.load_encoders(model, torch.float32, CPU).encode_text(["a ring"])
    transformer = FAMILY.denoiser.load(model, torch.float32, CPU)
    assert times[0] == 1000 > times[1] > times[2] > 0
    for time, noisy, expected in zip(times, calls, targets, strict=True):
        with torch.no_grad():
            ours = FAMILY.denoiser.predict(transformer, noisy, time[None] - 1, cond, torch.zeros(1, 6))
        assert torch.allclose(ours, expected, atol=1e-5)


@pytest.mark.parametrize("stored", ["fp8", "int8", "nf4"])
def test_quantized_weights_change_the_time_embedding_little(model, stored):
    """The transformer computes its time embedding in the dtype of a weight, which must not be quantized."""
    cond = FAMILY.load_encoders(model, torch.float32, CPU).encode_text(CAPTIONS[:1])
    noisy, t, sizes = torch.randn(1, 16, 8, 12, generator=torch.manual_seed(0)), torch.tensor([500]), torch.zeros(1, 6)
    wide = FAMILY.denoiser.load(model, torch.float32, CPU)
    narrow = FAMILY.denoiser.load(model, torch.float32, CPU, make_quantizer(stored))
    assert is_narrow(narrow.t_embedder.mlp[0])
    with torch.no_grad():
        predicted, expected = (FAMILY.denoiser.predict(each, noisy, t, cond, sizes) for each in (narrow, wide))
    assert (predicted - expected).norm() < 0.3 * expected.norm()
    narrow = FAMILY.denoiser.load(model, torch.bfloat16, CPU, make_quantizer(stored))
    learned = inject_lora(narrow, ["t_embedder.mlp.0"], AdapterOptions(4, 4.0), 0)
    for parameter in learned.values():
        parameter.data = parameter.data.bfloat16()
    half = {name: value if value.dtype == torch.bool else value.bfloat16() for name, value in cond.items()}
    with torch.no_grad():
        again = FAMILY.denoiser.predict(narrow, noisy.bfloat16(), t, half, sizes)
    assert (again.float() - expected).norm() < 0.3 * expected.norm()


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


def test_the_layout_has_every_module_as_in_diffusers_converter():
    """Each weight with its original key, fused as in the original, survives diffusers' conversion."""
    weights = tiny_transformer("z_image").state_dict()
    original: dict[str, dict[int, torch.Tensor]] = {}
    for name, weight in weights.items():
        module, _, kind = name.rpartition(".")
        ruled = rule_of(LAYOUT, module)
        if ruled is None:
            assert name in ("x_pad_token", "cap_pad_token")
            original[name] = {0: weight}
        else:
            original.setdefault(f"{ruled[1]}.{kind}", {})[ruled[0].part] = weight
    fused = {name: torch.cat([parts[part] for part in sorted(parts)]) for name, parts in original.items()}
    assert "layers.0.attention.qkv.weight" in fused
    back = convert_z_image_transformer_checkpoint_to_diffusers(fused)
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], weight) for name, weight in weights.items())


def test_a_folder_without_a_base_model_of_the_family_is_refused(model, tmp_path):
    other = Path(shutil.copytree(model, tmp_path / "other"))
    (other / "tokenizer" / "tokenizer.json").unlink()
    with pytest.raises(UsageError, match=r"tokenizer\.json is missing"):
        FAMILY.describe(other)


def test_diffusers_reads_every_layer_of_the_kohya_format():
    """Fused in the file, and split again by the loader; alpha differs from the rank."""
    denoiser = tiny_transformer("z_image")
    endings = ("to_q", "to_k", "to_v", "to_out.0", "w1", "w2", "w3")
    plain = random_lora(denoiser, rank=4, alpha=2.0, endings=endings)
    ours = {f"transformer.{name.partition('.')[2]}": pair for name, pair in plain.modules.items()}
    names = Names("z_image", "transformer", FAMILY.lora_files.prefixes, FAMILY.lora_files.layout)
    tensors, _ = kohya_tensors(LoraWeights(ours), names)
    assert any(name.endswith("attention_qkv.lora_down.weight") for name in tensors)
    read = ZImagePipeline.lora_state_dict(dict(tensors))
    assert len(read) == 2 * len(ours)
    for name, pair in ours.items():
        change = read[f"{name}.lora_B.weight"] @ read[f"{name}.lora_A.weight"]
        assert torch.allclose(change, pair.up @ pair.down * 0.5, atol=1e-6)
