"""Lumina 2: text and predictions of its pipeline, single files, and LoRA files in other programs' names."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import Lumina2Pipeline, Lumina2Transformer2DModel
from diffusers.loaders.single_file_utils import convert_lumina2_to_diffusers
from PIL import Image
from safetensors.torch import save_file

from lora_trainer.adapters.target_modules import target_modules
from lora_trainer.core.errors import UsageError
from lora_trainer.diffusion.timesteps import Shift
from lora_trainer.lora_format.kinds.lora import LoraPair
from lora_trainer.lora_format.kohya import kohya_tensors
from lora_trainer.lora_format.layouts import rule_of
from lora_trainer.lora_format.weights import LoraWeights
from lora_trainer.models.detection import detect_family
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.families.lumina2 import BEFORE, denoiser_part
from lora_trainer.models.family import TextOptions
from lora_trainer.models.lora_names import names_of, read_lora
from lora_trainer.models.published import public_architecture
from lora_trainer.models.single.lay_out import lacking_parts, lay_out
from lora_trainer.models.single.recognize import recognize
from lora_trainer.models.single.stored import Stored
from lora_trainer.models.single.texts import kind_of_file
from tests.families.lumina2 import checkpoint, original_names, published_tiny_pipeline, tiny_pipeline, tiny_transformer
from tests.importers.test_flow import imported_text
from tests.lora_format.tiny import random_lora
from tests.models.single.originals import write
from tests.models.single.test_published import empty_file
from tests.recipes.recipe import Bench, draw_images, exported, losses, record

CPU = torch.device("cpu")
FAMILY = FAMILIES["lumina2"]
CAPTIONS = ["a red ring on a blue background", "", "ring " * 300]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "lumina"
    torch.manual_seed(0)
    tiny_pipeline().save_pretrained(folder, safe_serialization=True)
    return folder


def encoded(model: Path, captions: list[Any]) -> dict[str, torch.Tensor]:
    return FAMILY.load_encoders(model, torch.float32, CPU).encode_text(captions)


def test_the_family_is_recognized_by_its_pipeline_and_described(model: Path) -> None:
    assert detect_family(model) == "lumina2"
    facts = FAMILY.describe(model)
    assert (facts.prediction, facts.pixel_step, facts.latent_channels, facts.caption_tokens) == ("flow", 16, 16, 256)
    assert facts.largest_side == 64 * 16, "its table of positions"
    assert FAMILY.denoiser.make_process(model).times.shift == Shift(6.0)


def test_text_is_encoded_as_the_pipeline_does(model: Path) -> None:
    """A caption behind the system prompt, and the empty one as the pipeline's own negative prompt."""
    found = encoded(model, CAPTIONS)
    with torch.no_grad():
        embeds, masks, empty, nothing = Lumina2Pipeline.from_pretrained(model, local_files_only=True).encode_prompt(
            [CAPTIONS[0], CAPTIONS[2]], negative_prompt=["", ""]
        )
    theirs = [(embeds[0], masks[0].bool()), (empty[0], nothing[0].bool()), (embeds[1], masks[1].bool())]
    for own, padding, (states, here) in zip(found["embeds"], found["padding"], theirs, strict=True):
        assert torch.equal(~padding, here)
        assert torch.equal(own[here], states[here])
        assert not own[padding].any()
    assert int(found["padding"][2].sum()) == 0, "what is longer is cut"


def test_prompt_weights_do_not_apply_to_the_system_prompt(model: Path) -> None:
    plain, weighed = encoded(model, ["a red ring"]), encoded(model, [(("a red ", 1.0), ("ring", 2.0))])
    assert torch.equal(plain["padding"], weighed["padding"])
    tokens = FAMILY.text.load(model, None, CPU).tokenizers["text_encoder"]
    before = 1 + len(tokens(BEFORE, add_special_tokens=False).input_ids)
    ratios = (weighed["embeds"] / plain["embeds"])[0, :, 0]
    assert torch.allclose(ratios[:before], ratios[0].expand(before), rtol=1e-4)
    assert not torch.allclose(ratios[int((~plain["padding"]).sum()) - 1], ratios[0], rtol=0.1)


@pytest.mark.parametrize("size", [(64, 64), (96, 48)])
def test_the_prediction_is_the_pipelines_at_every_step(model: Path, size: tuple[int, int]) -> None:
    """The pipeline turns time and velocity round; a step of its scheduler gets what `predict` returns."""
    pipeline = FAMILY.pipeline.make(model, torch.float32, CPU)
    calls: list[torch.Tensor] = []
    steps: list[tuple[torch.Tensor, torch.Tensor]] = []
    step = pipeline.scheduler.step

    def watch(module: torch.nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        calls.append(named["hidden_states"])

    def watch_step(velocity: torch.Tensor, time: torch.Tensor, *args: Any, **arguments: Any) -> Any:
        steps.append((velocity, time))
        return step(velocity, time, *args, **arguments)

    pipeline.transformer.register_forward_pre_hook(watch, with_kwargs=True)
    pipeline.scheduler.step = watch_step
    arguments = {"num_inference_steps": 3, "guidance_scale": 1.0, "output_type": "latent"}
    pipeline("a ring", width=size[0], height=size[1], generator=torch.manual_seed(0), **arguments)
    cond, transformer = encoded(model, ["a ring"]), FAMILY.denoiser.load(model, torch.float32, CPU)
    assert [float(time) for _, time in steps] == sorted((float(time) for _, time in steps), reverse=True)
    assert float(steps[0][1]) == 1000
    for noisy, (expected, time) in zip(calls, steps, strict=True):
        with torch.no_grad():
            ours = FAMILY.denoiser.predict(transformer, noisy, time[None] - 1, cond, torch.zeros(1, 6))
        assert torch.allclose(ours, expected, atol=1e-5)


def test_captions_of_different_lengths_do_not_affect_each_other(model: Path) -> None:
    transformer, cond = FAMILY.denoiser.load(model, torch.float32, CPU), encoded(model, CAPTIONS)
    noisy, t = torch.randn(3, 16, 8, 12, generator=torch.manual_seed(0)), torch.tensor([10, 500, 999])
    with torch.no_grad():
        together = FAMILY.denoiser.predict(transformer, noisy, t, cond, torch.zeros(3, 6))
        for row in range(3):
            own = {name: value[row : row + 1] for name, value in cond.items()}
            alone = FAMILY.denoiser.predict(transformer, noisy[row : row + 1], t[row : row + 1], own, torch.zeros(1, 6))
            assert torch.allclose(together[row : row + 1], alone, atol=1e-5)


def test_no_more_tokens_than_the_transformer_has_places_for(model: Path) -> None:
    assert FAMILY.reading(TextOptions(t5_tokens=299)).describe(model).caption_tokens == 299
    with pytest.raises(UsageError, match="at most 299 tokens"):
        FAMILY.reading(TextOptions(t5_tokens=300)).describe(model)


def test_a_folder_without_a_base_model_of_the_family_is_refused(model: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(model, tmp_path / "other"))
    (other / "tokenizer" / "tokenizer.json").unlink()
    with pytest.raises(UsageError, match=r"tokenizer\.json is missing"):
        FAMILY.describe(other)


def test_the_original_names_are_those_of_diffusers_converter() -> None:
    """Which knows the published width alone."""
    layers = {"num_layers": 1, "num_refiner_layers": 1, "ffn_dim_multiplier": 0.01}
    heads = {"hidden_size": 2304, "num_attention_heads": 24, "num_kv_heads": 8}
    weights = tiny_transformer(**heads, **layers).half()
    back = convert_lumina2_to_diffusers(original_names(weights))
    expected = weights.state_dict()
    assert back.keys() == expected.keys()
    assert all(torch.equal(back[name], weight) for name, weight in expected.items())


@pytest.mark.parametrize("bare", [False, True], ids=["whole", "bare"])
def test_a_checkpoint_equals_its_folder(bare: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    pipeline, folder = published_tiny_pipeline(), tmp_path / "folder"
    pipeline.save_pretrained(folder, safe_serialization=True)
    file = write(checkpoint(pipeline, bare=bare), tmp_path / "model.safetensors")
    parts: dict[str, Path | None] = {"tokenizer": folder / "tokenizer"}
    if bare:
        parts |= {"text_encoder": folder / "text_encoder", "vae": folder / "vae"}
    assert recognize(file).family == "lumina2"
    assert lacking_parts(recognize(file)) == ({"text_encoder", "tokenizer"} if bare else {"tokenizer"})
    laid_out = lay_out(file, parts)
    ours, theirs = (FAMILY.denoiser.load(each, torch.float32, CPU) for each in (laid_out, folder))
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert all(torch.equal(weight, theirs.state_dict()[name]) for name, weight in ours.state_dict().items())
    read, expected = (FAMILY.load_encoders(each, torch.float32, CPU) for each in (folder, laid_out))
    cond, same = (each.encode_text(CAPTIONS[:2]) for each in (read, expected))
    assert all(torch.equal(cond[name], same[name]) for name in cond)
    pixels = torch.rand(1, 3, 64, 64) * 2 - 1
    assert torch.equal(read.encode_image(pixels)[0], expected.encode_image(pixels)[0])
    noisy, t = torch.randn(2, 16, 8, 8), torch.tensor([3, 900])
    with torch.no_grad():
        first, second = (FAMILY.denoiser.predict(each, noisy, t, cond, torch.zeros(2, 6)) for each in (ours, theirs))
    assert torch.equal(first, second)


def test_all_that_a_file_lacks_is_named_at_once(tmp_path: Path) -> None:
    file = write(original_names(published_tiny_pipeline().transformer), tmp_path / "model.safetensors")
    with pytest.raises(UsageError) as refused:
        lay_out(file)
    messages = " ".join(f"{problem.message} {problem.fix}" for problem in refused.value.problems)
    assert all(
        part in messages for part in ("text_encoder", "VAE", "Gemma 2 lacks its tokenizer", "any Lumina 2 folder")
    )


def test_a_text_encoder_in_a_file_of_its_own_is_known() -> None:
    names = published_tiny_pipeline().text_encoder.state_dict()
    shapes = {f"model.{name}": tuple(each.shape) for name, each in names.items()}
    assert kind_of_file(Stored(Path("gemma.safetensors"), "", shapes)) == "gemma2"


def test_the_published_transformer_is_recognized_by_its_shapes(tmp_path: Path) -> None:
    with torch.device("meta"):
        tensors = original_names(FAMILY.denoiser.make(public_architecture("lumina2").denoiser))
    part = denoiser_part(recognize(empty_file(tmp_path / "model.safetensors", tensors, "BF16")).denoiser)
    published = public_architecture("lumina2").denoiser
    assert {name: part.config[name] for name in published} == dict(published)


def test_a_file_with_other_queries_to_a_key_is_refused(tmp_path: Path) -> None:
    tensors = original_names(tiny_transformer(num_kv_heads=3))
    with pytest.raises(UsageError, match=r"noise_refiner\.0\.attention\.qkv"):
        denoiser_part(recognize(write(tensors, tmp_path / "model.safetensors")).denoiser)


def test_kohyas_names_are_those_of_the_checkpoint_and_hold_the_same_changes() -> None:
    """ComfyUI and kohya's scripts find a layer by its name in the checkpoint with underscores."""
    transformer = tiny_transformer()
    plain = random_lora(transformer, rank=4, alpha=2.0, endings=linear_layers(transformer), component="transformer")
    tensors, _ = kohya_tensors(plain, names_of(FAMILY))
    original = original_names(transformer)
    layers = {f"lora_unet_{name.removesuffix('.weight').replace('.', '_')}": name for name in original}
    changes = {}
    for key in (key for key in tensors if key.endswith(".lora_up.weight")):
        name = key.removesuffix(".lora_up.weight")
        down, alpha = tensors[f"{name}.lora_down.weight"], tensors[f"{name}.alpha"]
        changes[layers[name]] = tensors[key] @ down * (alpha / len(down))
        assert changes[layers[name]].shape == original[layers[name]].shape
    expected: dict[str, dict[int, torch.Tensor]] = {}
    for module, pair in plain.modules.items():
        ruled = rule_of(FAMILY.lora_files.layout, module.partition(".")[2])
        assert ruled is not None
        expected.setdefault(f"{ruled[1]}.weight", {})[ruled[0].part] = pair.delta()
    assert changes.keys() == expected.keys()
    for name, parts in expected.items():
        assert torch.allclose(changes[name], torch.cat([parts[part] for part in sorted(parts)]), atol=1e-6)


def test_diffusers_reads_the_original_names_of_a_lora_on_all_blocks() -> None:
    """Its converter knows the published width, and only files with every layer of the blocks."""
    blocks = {"num_layers": 1, "num_refiner_layers": 1}
    with torch.device("meta"):
        transformer = Lumina2Transformer2DModel.from_config({**public_architecture("lumina2").denoiser, **blocks})
    endings = tuple(name for name in linear_layers(transformer) if name.startswith(("layers", "noise_", "context_")))
    shapes = {name: transformer.get_submodule(name).weight.shape for name in endings}
    original: dict[str, torch.Tensor] = {}
    expected: dict[str, torch.Tensor] = {}
    for name, (rows, columns) in shapes.items():
        ruled = rule_of(FAMILY.lora_files.layout, name)
        assert ruled is not None
        rule, key = ruled
        up = torch.randn(rows, 2, generator=torch.manual_seed(len(name)))
        down = torch.randn(2, columns, generator=torch.manual_seed(len(key)))
        original[f"diffusion_model.{key}.lora_A.weight"] = down
        expected[f"transformer.{name}"] = up @ down
        fused = original.get(f"diffusion_model.{key}.lora_B.weight", torch.empty(0, 2))
        assert (len(fused) > 0) == (rule.part > 0), "a fused layer's parts come in their order"
        original[f"diffusion_model.{key}.lora_B.weight"] = torch.cat([fused, up])
    read = Lumina2Pipeline.lora_state_dict(dict(original))
    assert len(read) == 2 * len(expected)
    for name, change in expected.items():
        assert torch.allclose(read[f"{name}.lora_B.weight"] @ read[f"{name}.lora_A.weight"], change, atol=1e-5)


@pytest.mark.parametrize("targets", ["attention", "attention+ff"])
@pytest.mark.parametrize("family", ["lumina2", "z_image"])
def test_a_file_without_a_header_is_not_taken_for_the_family_with_the_same_names(
    family: str, targets: str, tmp_path: Path
) -> None:
    """By the shapes of its layers: both families' original names of these layers are the same."""
    spec = FAMILIES[family]
    with torch.device("meta"):
        transformer = spec.denoiser.make(public_architecture(family).denoiser)
    modules = {}
    for name in target_modules(transformer, spec.denoiser, targets):
        rows, columns = transformer.get_submodule(name).weight.shape
        modules[f"transformer.{name}"] = LoraPair(torch.ones(1, columns), torch.ones(rows, 1), 1.0)
    tensors, _ = kohya_tensors(LoraWeights(modules), names_of(spec))
    save_file(tensors, tmp_path / "lora.safetensors")
    found = read_lora(tmp_path / "lora.safetensors")
    assert found.family == family
    assert found.modules.keys() == modules.keys()


def linear_layers(transformer: torch.nn.Module) -> tuple[str, ...]:
    return tuple(name for name, module in transformer.named_modules() if isinstance(module, torch.nn.Linear))


def test_a_lora_is_on_every_block() -> None:
    transformer = tiny_transformer()
    found = target_modules(transformer, FAMILY.denoiser, "attention")
    assert len(found) == 4 * (2 + 1 + 1)
    assert len(target_modules(transformer, FAMILY.denoiser, "attention+ff")) == 7 * (2 + 1 + 1)


def test_configs_of_kohyas_scripts_and_ai_toolkit_are_imported(tmp_path: Path) -> None:
    kohya = 'pretrained_model_name_or_path = "m"\nnetwork_module = "networks.lora_lumina"\ngemma2 = "g"\nae = "v"\n'
    flow = imported_text(tmp_path, "a.toml", kohya + "text_encoder_lr = 1e-4\n").config.flow
    assert (flow.timestep_sampling, flow.shift) == ("logit_normal", 6.0)
    boxes = {"LoRA_type": "Standard", "lumina_checkbox": True, "max_resolution": "512,512", "optimizer": "AdamW"}
    assert imported_text(tmp_path, "gui.json", json.dumps(boxes)).config.flow.shift == 6.0
    process = {"model": {"name_or_path": "m", "is_lumina2": True}, "train": {"timestep_type": "lumina2_shift"}}
    flow = imported_text(tmp_path, "job.json", json.dumps({"config": {"process": [process]}})).config.flow
    assert (flow.timestep_sampling, flow.shift) == ("uniform", "model")


def test_a_run_on_a_single_file_is_that_on_its_folder(tmp_path: Path) -> None:
    """By the command: trained, sampled, and the same LoRA to the bit."""
    torch.manual_seed(0)
    pipeline, folder = published_tiny_pipeline(), tmp_path / "folder"
    pipeline.save_pretrained(folder, safe_serialization=True)
    file = write(checkpoint(pipeline), tmp_path / "model.safetensors")
    benches = [
        Bench(each, draw_images(tmp_path / "data", 4), tmp_path / name, tmp_path / "cache")
        for name, each in (("of_folder", folder), ("of_file", file))
    ]
    settings: dict[str, object] = {"data__resolution": 64, "lora__target_modules": "attention+ff"}
    settings |= {"sample__every_n_steps": 2, "sample__num_inference_steps": 2}
    assert benches[0].run("cat", steps=3, **settings) == 0
    assert benches[1].run("cat", steps=3, model__text_encoders=folder, **settings) == 0
    assert record(benches[1].folder("cat"))["status"] == "done"
    first, second = (sorted((each.folder("cat") / "samples").glob("*_with*.png")) for each in benches)
    assert len(first) == len(second) > 0
    assert all(
        Image.open(one).tobytes() == Image.open(other).tobytes() for one, other in zip(first, second, strict=True)
    )
    assert len(set(losses(benches[0].folder("cat")))) == 3
    assert losses(benches[1].folder("cat")) == losses(benches[0].folder("cat"))
    assert exported(benches[1].folder("cat")) == exported(benches[0].folder("cat"))
