"""What somebody adds to the trainer: each kind in one place, trained, resumed and planned by the real command."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import ConfigMixin, ModelMixin, StableDiffusionPipeline
from diffusers.configuration_utils import register_to_config
from diffusers.loaders import PeftAdapterMixin
from safetensors.torch import load_file
from torch import Tensor, nn

from lora_trainer.adapters.adapter_kinds import ADAPTERS
from lora_trainer.adapters.base import AdapterKind, AdapterOptions, AdapterSpec
from lora_trainer.cli.main import main
from lora_trainer.core.families import families
from lora_trainer.diffusion.loss import WEIGHTINGS
from lora_trainer.lora_format.layer_updates import FactorUpdate
from lora_trainer.lora_format.layouts import Rule
from lora_trainer.lora_format.weights import module_name
from lora_trainer.lora_format.writing import plain_forms
from lora_trainer.models.autoencoder import load_vae, vae_facts
from lora_trainer.models.families import FAMILIES, sd15
from lora_trainer.models.family import DenoiserSpec, Family, LoraFileSpec, ModelFacts, PipelineSpec
from lora_trainer.models.folder import check_components, read_config
from lora_trainer.models.frozen import load_frozen
from lora_trainer.models.noise_schedule import make_process, make_scheduler, read_noise_schedule
from lora_trainer.optim.optimizers import OPTIMIZERS, OptimizerSpec
from tests.recipes.recipe import Bench, exported, losses


def momentum(groups, config):
    return torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.beta1)


@pytest.mark.slow
def test_an_optimizer_is_one_entry(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = OptimizerSpec(momentum, state=lambda shape: [4 * math.prod(shape)])
    monkeypatch.setitem(OPTIMIZERS, "momentum", spec)
    settings = {"optimizer__name": "momentum", "optimizer__learning_rate": 1e-2, "checkpoint__every_n_steps": 2}
    assert bench.run("straight", steps=4, **settings) == 0
    assert bench.run("resumed", steps=2, **settings) == 0
    assert bench.run("resumed", "--resume", steps=4, **settings) == 0
    assert exported(bench.folder("resumed")) == exported(bench.folder("straight"))
    assert len(set(losses(bench.folder("straight")))) == 4
    capsys.readouterr()
    assert main(bench.arguments("planned", command="plan", optimizer__name="momentum")) == 0
    assert bench.run("wrong", optimizer__name="momentun") == 2
    assert "Did you mean momentum?" in capsys.readouterr().err


@pytest.mark.slow
def test_a_weighting_is_one_entry(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WEIGHTINGS, "late", lambda config, process: lambda t: (t > 500).float() + 1.0)
    assert bench.run("plain", steps=3) == 0
    assert bench.run("late", steps=3, loss__weighting="late") == 0
    plain, late = losses(bench.folder("plain")), losses(bench.folder("late"))
    assert 1.0 <= late[0] / plain[0] <= 2.0
    assert late != plain


class Kronecker(nn.Module):
    """A layer whose weight changes by a Kronecker product: of full rank, unlike a LoRA."""

    def __init__(self, layer: nn.Linear, sides: tuple[int, int]) -> None:
        super().__init__()
        self.base_layer = layer
        rows, columns = sides
        out, width = layer.weight.shape
        self.left = nn.Parameter(torch.zeros(rows, columns))
        self.right = nn.Parameter(torch.randn(out // rows, width // columns))

    def forward(self, x: Tensor) -> Tensor:
        base = self.base_layer(x)
        return base + nn.functional.linear(x.to(self.left.dtype), torch.kron(self.left, self.right)).to(base.dtype)


class KroneckerUpdate(FactorUpdate):
    """Of the factors `left` and `right`."""

    algorithm, title, scaled = "kronecker", "Kronecker", "left"

    @property
    def rank(self) -> int:
        return min(self.weight_shape)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return tuple(a * b for a, b in zip(self.tensors["left"].shape, self.tensors["right"].shape, strict=True))

    def delta(self, weight: Tensor | None = None) -> Tensor:
        return torch.kron(self.tensors["left"].float(), self.tensors["right"].float())


def put_kronecker(
    model: nn.Module, modules: Sequence[str], options: AdapterOptions, seed: int
) -> dict[str, nn.Parameter]:
    found = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name in modules:
            layer = model.get_submodule(name)
            adapted = Kronecker(layer, (2, 2))
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, adapted)
            found |= {f"{name}.left": adapted.left, f"{name}.right": adapted.right}
    return found


def kronecker_updates(
    trained: Mapping[str, Tensor], component: str, options: AdapterOptions
) -> dict[str, KroneckerUpdate]:
    names = [name.removesuffix(".left") for name in trained if name.endswith(".left")]
    return {
        module_name(component, name): KroneckerUpdate({end: trained[f"{name}.{end}"] for end in ("left", "right")})
        for name in names
    }


KRONECKER = AdapterKind(put_kronecker, kronecker_updates, plain_forms)


@pytest.mark.slow
def test_an_adapter_is_one_entry(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not a low-rank product: trained, resumed, planned and exported in both forms."""
    monkeypatch.setitem(ADAPTERS, "kronecker", AdapterSpec(lambda: KRONECKER))
    settings = {"lora__type": "kronecker", "checkpoint__every_n_steps": 2, "optimizer__learning_rate": 1e-3}
    assert bench.run("straight", steps=4, **settings) == 0
    assert bench.run("resumed", steps=2, **settings) == 0
    assert bench.run("resumed", "--resume", steps=4, **settings) == 0
    files = exported(bench.folder("straight"))
    assert exported(bench.folder("resumed")) == files
    kohya = load_file(bench.folder("straight") / "straight.safetensors")
    left = [name for name in kohya if name.endswith(".left")]
    assert left
    assert all(name.startswith("lora_unet_") for name in left)
    assert all(bool(kohya[name].any()) for name in left)
    change = torch.kron(kohya[left[0]].float(), kohya[left[0].replace(".left", ".right")].float())
    assert torch.linalg.matrix_rank(change) == min(change.shape)
    assert {name.rpartition(".")[2] for name in files["diffusers"]} == {"left", "right"}
    capsys.readouterr()
    assert main(bench.arguments("planned", command="plan", lora__type="kronecker")) == 0
    assert "GiB" in capsys.readouterr().out


class MixerBlock(nn.Module):
    def __init__(self, width: int, text_width: int) -> None:
        super().__init__()
        self.text = nn.Linear(text_width, width)
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        mixed = x + x.mean(1, keepdim=True) + self.text(text)[:, None]
        return x + self.narrow(nn.functional.silu(self.wide(mixed)))


class Mixer(ModelMixin, ConfigMixin, PeftAdapterMixin):  # type: ignore[misc]
    """A denoiser of its own kind: no attention, no convolution, the mean of the text. Tokens are places of the latents."""

    _supports_gradient_checkpointing = True

    @register_to_config
    def __init__(
        self,
        in_channels: int = 4,
        sample_size: int = 8,
        width: int = 32,
        text_width: int = 32,
        layers: int = 2,
        time_cond_proj_dim: int | None = None,  # which diffusers' pipeline asks for
    ) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(in_channels + 1, width), nn.Linear(width, in_channels)
        self.blocks = nn.ModuleList(MixerBlock(width, text_width) for _ in range(layers))
        self.gradient_checkpointing = False

    def forward(self, sample: Tensor, timestep: Tensor, encoder_hidden_states: Tensor, **_: Any) -> tuple[Tensor]:
        count, _, height, width = sample.shape
        time = (timestep.to(sample) / 1000).expand(count)[:, None, None, None].expand(-1, 1, height, width)
        x = self.into(torch.cat([sample, time], 1).flatten(2).transpose(1, 2))
        for block in self.blocks:
            arguments = (x, encoder_hidden_states.mean(1))
            x = (
                self._gradient_checkpointing_func(block, *arguments)
                if self.gradient_checkpointing
                else block(*arguments)
            )
        return (self.out(x).transpose(1, 2).unflatten(2, (height, width)),)


def mixer_facts(folder: Path) -> ModelFacts:
    channels, downscale = vae_facts(folder)
    check_components(folder, ("unet", "vae", "text_encoder"))
    side, prediction = read_config(folder, "unet/config.json")["sample_size"], read_noise_schedule(folder).prediction
    return ModelFacts(folder, "mixer", side * downscale, channels, downscale, downscale, prediction, 77)


def load_mixer(folder: Path, dtype: torch.dtype, device: torch.device, narrow: Any = None) -> nn.Module:
    loaded: nn.Module = load_frozen(Mixer, folder / "unet", dtype, device, narrow)
    return loaded


def make_mixer(config: Mapping[str, Any]) -> nn.Module:
    made: nn.Module = Mixer.from_config(dict(config))
    return made


def make_mixer_pipeline(folder: Path, dtype: torch.dtype, device: torch.device) -> StableDiffusionPipeline:
    texts = sd15.load_texts(folder, dtype, device)
    nothing = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    return StableDiffusionPipeline(
        vae=load_vae(folder, dtype, device),
        text_encoder=texts.encoders["text_encoder"],
        tokenizer=texts.tokenizers["text_encoder"],
        unet=load_mixer(folder, dtype, device),
        scheduler=make_scheduler(folder),
        **nothing,
    )


WIDE = ("blocks.*.wide", "blocks.*.narrow")
MIXER = Family(
    name="mixer",
    read_facts=mixer_facts,
    denoiser=DenoiserSpec(
        component="unet",
        load=load_mixer,
        make=make_mixer,
        make_process=make_process,
        predict=lambda denoiser, noisy, t, cond, sizes: denoiser(noisy, t, cond["embeds"])[0],
        lora_targets={"attention": ("blocks.*.text",), "attention+ff": ("blocks.*.text", *WIDE)},
        thin=lambda config: {**config, "width": int(config["width"]) // 2},
        thinness="half of its width",
    ),
    encoders=sd15.FAMILY.encoders,
    text=replace(sd15.TEXT, shapes=lambda config, options: {"embeds": (77 * options.chunks, config["text_width"])}),
    pipeline=PipelineSpec(class_name="MixerPipeline", make=make_mixer_pipeline),
    lora_files=LoraFileSpec(
        base_names=lambda facts: ("mixer_v1", "mixer-v1/lora"),
        prefixes={"unet": "lora_unet", "text_encoder": "lora_te"},
        layout=tuple(Rule(f"blocks.{{}}.{layer}", f"layers.{{}}.{layer}") for layer in ("text", "wide", "narrow")),
    ),
)
PUBLISHED = {
    "title": "Mixer",
    "facts": {
        "resolution": 512,
        "latent_channels": 4,
        "downscale": 8,
        "pixel_step": 8,
        "prediction": "epsilon",
        "caption_tokens": 77,
    },
    "phases": {
        "text_layers": [[12, 768, 3072]],
        "text_encoders": [123060480],
        "autoencoder": 83653863,
        "layer": 2097152,
        "encode": 643,
        "decode": 769,
        "predict": 4096,
        "caption": 946332,
    },
    "denoiser": {"in_channels": 4, "sample_size": 64, "width": 1024, "text_width": 768, "layers": 12},
}


@pytest.fixture
def mixer_bench(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """The family in the table, what its JSON file would hold, and a tiny model of it."""
    monkeypatch.setitem(families(), "mixer", PUBLISHED)
    monkeypatch.setitem(FAMILIES, "mixer", MIXER)
    model = tmp_path / "model"
    shutil.copytree(bench.model, model)
    shutil.rmtree(model / "unet")
    torch.manual_seed(0)
    Mixer().save_pretrained(model / "unet")
    index = json.loads((model / "model_index.json").read_text(encoding="utf-8"))
    (model / "model_index.json").write_text(json.dumps(index | {"_class_name": "MixerPipeline"}), encoding="utf-8")
    return replace(bench, model=model)


def test_a_family_is_one_entry(mixer_bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    """With a denoiser of its own: detected, planned, trained with its text encoder, resumed, exported and sampled."""
    bench = mixer_bench
    settings = {
        "checkpoint__every_n_steps": 2,
        "lora__target_modules": "attention+ff",
        "text_encoder__learning_rates": "[1e-3]",
        "memory__gradient_checkpointing": "true",
    }
    assert bench.run("straight", steps=4, gates__lora_check="lite", **settings) == 0
    assert bench.run("resumed", steps=2, **settings) == 0
    assert bench.run("resumed", "--resume", steps=4, **settings) == 0
    files = exported(bench.folder("straight"))
    assert exported(bench.folder("resumed")) == files
    assert len(set(losses(bench.folder("straight")))) == 4
    kohya = load_file(bench.folder("straight") / "straight.safetensors")
    assert {name.split("_")[1] for name in kohya} == {"unet", "te"}
    assert bool(kohya["lora_unet_blocks_1_wide.lora_up.weight"].any())
    assert any(name.startswith("unet.blocks.0.text.") for name in files["diffusers"])
    assert list(bench.folder("straight").rglob("*.png"))
    capsys.readouterr()
    assert main(["inspect", str(bench.folder("straight") / "straight.safetensors"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["family"] == "mixer"


def test_a_family_is_planned_without_a_model(mixer_bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(mixer_bench.arguments("planned", command="plan")) == 0
    assert "mixer (model)" in capsys.readouterr().out
    assert main(["plan", "--preset", "12gb", "--set", "model.family=mixer"]) == 0
    assert "mixer (published model)" in capsys.readouterr().out
    assert main(["plan", "--set", "model.family=mixxer"]) == 2
    assert "Did you mean mixer?" in capsys.readouterr().err
