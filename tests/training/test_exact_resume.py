"""A run that is stopped and resumed after every step equals the uninterrupted run, bit for bit."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from PIL import Image

from lora_trainer.config import schema
from lora_trainer.config.tables import names_for
from lora_trainer.config.toml import setting_names
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.single import tokenizers
from lora_trainer.training import control
from lora_trainer.training.checkpoints.checkpoint import newest_valid
from lora_trainer.training.training_run import Run
from tests.families.own import own_families
from tests.models.single.originals import unet_checkpoint, write
from tests.models.single.tiny import tiny_pipeline
from tests.recipes.recipe import draw_images
from tests.training.tiny_run import TinyPlace, flush_every, outcome, signal_at_step

pytestmark = pytest.mark.exact

STEPS = 6  # nine trained images: at two per step the fifth step of an epoch has one
Case = dict[str, object]

# Each case is one run with all of its settings. Small cases run in every suite, the others in the slow one.
CASES: dict[str, Case] = {
    "plain": {"checkpoint__every_n_steps": 2, "validation__every_n_steps": 2},
    "preserved": {
        "loss__output_preservation_weight": 0.5,
        "loss__output_preservation_every_n_steps": 2,
        "loss__output_preservation_prompts": ("a house", "a car"),
        "loss__output_preservation_class": "a thing",
        "captions__trigger_word": "sks",
    },
    "adamw8bit": {"optimizer__name": "adamw8bit", "lora__rank": 128, "lr_scheduler__name": "linear"},
    "paged_adamw8bit": {"optimizer__name": "paged_adamw8bit", "lora__rank": 128, "lr_scheduler__name": "cosine"},
    "adafactor": {
        "optimizer__name": "adafactor",
        "lr_scheduler__name": "cosine_with_restarts",
        "lr_scheduler__cycles": 2,
    },
    "prodigy": {
        "optimizer__name": "prodigy",
        "optimizer__learning_rate": 1.0,
        "lr_scheduler__name": "polynomial",
        "lr_scheduler__power": 3.0,
        "lr_scheduler__warmup_steps": 2,
        "optimizer__max_grad_norm": 0.01,
    },
    "schedule_free": {
        "optimizer__name": "adamw_schedulefree",
        "lr_scheduler__name": "constant_with_warmup",
        "optimizer__beta1": 0.8,
        "optimizer__beta2": 0.9,
        "optimizer__weight_decay": 0.1,
        "validation__every_n_steps": 1,
    },
    "lion": {
        "optimizer__name": "lion",
        "lr_scheduler__name": "one_cycle",
        "optimizer__clip_value": 0.5,
        "optimizer__max_grad_norm": 0,
        "train__ema_decay": 0.9,
        "memory__weight_dtype": "bf16",
        "validation__every_n_steps": 2,
    },
    "layers, bf16 alone": {
        "optimizer__layer_learning_rates": {"down_blocks.*": 0.5, "*.to_k": 2.0},
        "optimizer__layer_weight_decay": {"*.attn2.*": 0.2},
        "optimizer__gradient_noise": 0.01,
        "optimizer__gradient_noise_decay": 0.3,
        "lr_scheduler__name": "one_cycle",
        "lr_scheduler__cycle_momentum": True,
        "lr_scheduler__base_momentum": 0.8,
        "lr_scheduler__max_momentum": 0.9,
        "lr_scheduler__warmup_steps": 3,
        "optimizer__stochastic_rounding": True,
        "memory__weight_dtype": "bf16",
        "train__swa_start": 0.5,
        "train__swa_every_n_steps": 2,
    },
    "SWA": {
        "lr_scheduler__name": "cosine",
        "train__swa_start": 0.4,
        "train__swa_every_n_steps": 2,
        "validation__every_n_steps": 1,
    },
    "bf16 alone": {
        "optimizer__stochastic_rounding": True,
        "memory__weight_dtype": "bf16",
        "optimizer__gradient_noise": 0.01,
        "train__swa_start": 2,
        "train__swa_every_n_steps": 1,
        "train__swa_learning_rate": 3e-3,
        "train__effective_batch_size": 3,
        "train__max_micro_batch_size": 1,
        "validation__every_n_steps": 2,
    },
    "bf16 alone, 8 bits": {
        "optimizer__stochastic_rounding": True,
        "memory__weight_dtype": "bf16",
        "optimizer__name": "adamw8bit",
        "lora__rank": 128,
        "train__ema_decay": 0.9,
    },
    "bf16 alone, adafactor": {
        "optimizer__stochastic_rounding": True,
        "memory__weight_dtype": "bf16",
        "optimizer__name": "adafactor",
    },
    "bf16 alone, lion": {
        "optimizer__stochastic_rounding": True,
        "memory__weight_dtype": "bf16",
        "optimizer__name": "lion",
    },
    "by layer": {
        "lora__rank_pattern": {"mid_block.*": 2, "text_encoder.*": 3},
        "lora__alpha_pattern": {"*.to_k": 1.5},
        "lora__dropout_pattern": {"*.attn2.*": 0.2},
        "lora__init_lora_weights": "svd_down",
        "lora__loraplus_lr_ratio": 4.0,
        "lora__loraplus_text_encoder_lr_ratio": 2.0,
        "text_encoder__learning_rates": (1e-3,),
    },
    "pissa": {
        "lora__init_lora_weights": "pissa",
        "train__ema_decay": 0.9,
        "memory__weight_dtype": "bf16",
        "text_encoder__learning_rates": (1e-3,),
        "validation__every_n_steps": 2,
    },
    "olora": {"lora__init_lora_weights": "olora", "memory__weight_dtype": "int8"},
    "T-LoRA": {
        "lora__timestep_min_rank": 1,
        "lora__timestep_rank_exponent": 2.0,
        "train__effective_batch_size": 3,
        "memory__gradient_checkpointing": "true",
    },
    "LoKr by layer": {
        "lora__type": "lokr",
        "lora__lokr_factor": 4,
        "lora__rank_pattern": {"mid_block.*": 2},
        "lora__alpha_pattern": {"*.to_k": 1.5},
        "lora__dropout_pattern": {"*.attn2.*": 0.2},
        "memory__weight_dtype": "bf16",
        "train__ema_decay": 0.9,
    },
    "DoRA with T-LoRA": {
        "lora__type": "dora",
        "lora__timestep_min_rank": 1,
        "lora__loraplus_lr_ratio": 4.0,
        "train__effective_batch_size": 3,
        "memory__gradient_checkpointing": "true",
    },
    "DoRA, bf16 alone": {
        "lora__type": "dora",
        "optimizer__stochastic_rounding": True,
        "memory__weight_dtype": "bf16",
    },
    "fp16": {"memory__weight_dtype": "fp16", "lora__dropout": 0.1, "train__ema_decay": 0.9},
    "fp8": {"memory__weight_dtype": "fp8", "lora__target_modules": "attention+ff"},
    "int8": {"memory__weight_dtype": "int8", "lora__dropout": 0.1},
    "int8 products": {
        "memory__weight_dtype": "int8",
        "memory__int8_matmul": True,
        "lora__target_modules": "attention+ff",
    },
    "nf4": {
        "memory__weight_dtype": "nf4",
        "loss__weighting": "debiased",
        "lora__target_modules": "attention+ff",
        "memory__gradient_checkpointing": "true",
    },
    "sd2": {"family": "sd2", "noise__zero_terminal_snr": True, "loss__weighting": "v_as_epsilon"},
    "sdxl": {"family": "sdxl", "memory__gradient_checkpointing": "true", "lora__dropout": 0.2, "lora__alpha": 2.0},
    "sd3": {
        "family": "sd3",
        "memory__gradient_checkpointing": "true",
        "lora__target_modules": "attention+ff",
        "captions__dropout": 0.3,
    },
    "sd3 without T5": {"family": "sd3-without-t5", "lora__dropout": 0.1},
    "flux": {
        "family": "flux",
        "data__resolution": 64,
        "memory__weight_dtype": "bf16",
        "memory__gradient_checkpointing": "true",
        "lora__dropout": 0.1,
    },
    "schnell": {
        "family": "flux-schnell",
        "loss__guidance_target": 3.5,
        "validation__every_n_steps": 2,
        "data__resolution": 64,
        "memory__weight_dtype": "int8",
        "lora__target_modules": "attention+ff",
    },
    "flux2": {
        "family": "flux2",
        "data__resolution": 64,
        "memory__gradient_checkpointing": "true",
        "lora__target_modules": "attention+ff",
        "captions__dropout": 0.3,
    },
    "chroma": {
        "family": "chroma",
        "data__resolution": 64,
        "memory__gradient_checkpointing": "true",
        "captions__dropout": 0.3,
    },
    "z_image": {
        "family": "z_image",
        "data__resolution": 64,
        "lora__target_modules": "attention+ff",
        "captions__dropout": 0.3,
    },
    "qwen_image": {
        "family": "qwen_image",
        "data__resolution": 64,
        "lora__target_modules": "attention+ff",
        "captions__dropout": 0.3,
    },
    "qwen_image21": {
        "family": "qwen_image21",
        "data__resolution": 64,
        "lora__target_modules": "attention+ff",
        "captions__dropout": 0.3,
    },
    "krea2": {
        "family": "krea2",
        "data__resolution": 64,
        "lora__target_modules": "attention+ff",
        "captions__dropout": 0.3,
    },
    "anima": {
        "family": "anima",
        "data__resolution": 64,
        "lora__target_modules": "attention+ff",
        "captions__dropout": 0.3,
    },
    **{
        name: {
            "family": name,
            "data__resolution": 64,
            "lora__target_modules": "attention+ff",
            "captions__dropout": 0.3,
        }
        for name in own_families()
    },
    "noise": {
        "noise__offset": 0.1,
        "noise__multires_iterations": 3,
        "noise__multires_discount": 0.5,
        "noise__input_perturbation": 0.1,
        "loss__type": "huber",
        "loss__huber_delta": 0.05,
        "loss__min_snr_gamma": 5.0,
        "lora__use_rslora": True,
    },
    "split": {
        "train__effective_batch_size": 3,
        "train__max_micro_batch_size": 1,
        "hardware__attention_backend": "math",
    },
    "captions": {
        "captions__shuffle": True,
        "captions__keep_tokens": 1,
        "captions__tag_dropout": 0.3,
        "captions__dropout": 0.3,
        "captions__dropout_every_n_epochs": 2,
        "captions__wildcards": True,
        "captions__prompt_weighting": True,
        "captions__trigger_word": "sks",
        "captions__variants": 3,
        "loss__guidance_target": 3.0,
    },
    "views": {
        "data__resolutions": (64, 32),
        "data__crop": "random",
        "data__crop_variants": 2,
        "data__flip": True,
        "data__color_variants": 1,
    },
    "sources": {"sources": True, "loss__prior_loss_weight": 0.5, "loss__unmasked_weight": 0.1},
    "control": {
        "validation__split": 0.5,
        "validation__every_n_steps": 1,
        "safeguards__reduce_lr_on_plateau": True,
        "safeguards__plateau_window": 2,
        "safeguards__plateau_spread": 10.0,
        "safeguards__clip_on_loss_spike": True,
        "safeguards__grad_spike_factor": 1.5,
    },
    "agreement": {
        "validation__split": 0.4,
        "validation__every_n_steps": 1,
        "safeguards__early_stopping": True,
        "safeguards__early_stopping_metric": "agreement",
        "safeguards__patience": 9,
        "text_encoder__learning_rates": (1e-2,),
        "lora__dropout": 0.1,
    },
    "texts": {
        "text_encoder__learning_rates": (1e-2,),
        "text_encoder__lora_rank": 2,
        "text_encoder__lora_alpha": 4.0,
        "lora__dropout": 0.1,
        "captions__dropout": 0.3,
        "captions__prompt_weighting": True,
        "train__ema_decay": 0.9,
        "validation__every_n_steps": 2,
    },
    "words": {
        "textual_inversion__placeholder_tokens": ("<zobo>", "<zub>"),
        "textual_inversion__num_vectors": 2,
        "textual_inversion__initializer_token": "ring",
        "captions__prefix": "<zobo> <zub> ",
        "captions__dropout": 0.3,
        "train__ema_decay": 0.9,
        "validation__every_n_steps": 2,
    },
    "two texts": {
        "family": "sdxl",
        "text_encoder__learning_rates": (1e-2, 5e-3),
        "textual_inversion__placeholder_tokens": ("<zobo>",),
        "captions__trigger_word": "<zobo>",
        "memory__weight_dtype": "bf16",
        "memory__gradient_checkpointing": "true",
        "cache__latents": False,
    },
    "t5": {
        "family": "sd3",
        "text_encoder__learning_rates": (0.0, 5e-3, 1e-2),
        "text_encoder__max_sequence_length": 16,
        "lora__dropout": 0.1,
        "captions__dropout": 0.3,
        "memory__weight_dtype": "bf16",
        "memory__gradient_checkpointing": "true",
        "validation__every_n_steps": 2,
    },
    "uncached": {"cache__latents": False, "data__flip": True, "cache__workers": 2},
}
# test_exact_split resumes Lion with two processes; tests/recipes/test_families.py resumes every family.
QUICK_CASES = (
    "plain",
    "layers, bf16 alone",
    "adamw8bit",
    "schedule_free",
    "pissa",
    "fp16",
    "split",
    "captions",
    "agreement",
    "texts",
    "words",
)
EVERY_CASE = [pytest.param(name, marks=() if name in QUICK_CASES else pytest.mark.slow) for name in CASES]


def several_sources(folder: Path) -> tuple[dict[str, Any], ...]:
    """Images with masks, weights and repeats, and regularization images. Drawn once."""
    if not folder.exists():
        for path in sorted(draw_images(folder / "masked", 6).glob("*.png")):
            (folder / "masks").mkdir(exist_ok=True)
            with Image.open(path) as image:
                Image.linear_gradient("L").resize(image.size).save(folder / "masks" / path.name)
        for path in sorted(draw_images(folder / "kept", 9).glob("*.png"))[:6]:  # those of the other source
            path.unlink()
            path.with_suffix(".txt").unlink()
    masked = {"path": str(folder / "masked"), "masks": str(folder / "masks"), "loss_weight": 0.5, "repeats": 1.5}
    return masked, {"path": str(folder / "kept"), "is_reg": True}


@pytest.fixture
def makes(place: TinyPlace, tiny_models: Callable[[str], Path], tmp_path: Path) -> Callable[..., Run]:
    """A fresh job of a case, in a named folder."""

    def make(case: str, name: str, **changes: object) -> Run:
        settings = {**CASES[case], **changes}
        here = replace(place, model=tiny_models(str(settings.pop("family", "sd15"))))
        if settings.pop("sources", False):
            settings["data__sources"] = several_sources(tmp_path / "sources")
        return here.run(name, steps=STEPS, **settings)

    return make


@pytest.mark.parametrize("case", EVERY_CASE)
def test_stopped_after_every_step(case, place, makes):
    straight = makes(case, "straight")
    place.train(straight)
    for step in range(STEPS):
        run = signal_at_step(makes(case, "broken"), step)
        state, interrupt = place.resume(run)
        assert state.step == step + 1
        assert interrupt.signal == signal.SIGTERM
    # After a signal in the last step, this session measures the result.
    broken = makes(case, "broken")
    place.resume(broken)
    assert outcome(broken) == outcome(straight)


def test_stopped_between_two_flushes(place, makes, monkeypatch):
    """Metrics are delayed, as on a GPU: spikes and skipped steps equal those of the uninterrupted run."""
    flush_every(3, monkeypatch)
    for name, value in {"JUDGED_EVERY": 3, "FIRST_JUDGED": 2}.items():
        monkeypatch.setattr(control, name, value)
    settings = {
        "safeguards__clip_on_loss_spike": True,
        "safeguards__loss_spike_ratio": 1.01,
        "safeguards__grad_spike_factor": 1.05,
        "train__max_steps": 10,
    }
    settings |= {"checkpoint__every_n_steps": 100, "validation__every_n_steps": 0}

    def losing(name: str) -> Run:
        run = makes("plain", name, **settings)
        true, seen = run.feed.micros, 3.0

        def micros(step: int) -> list[Any]:
            """The target moves further away with each step; that of the fifth is not finite."""
            scale = float("nan") if step == 4 else seen**step
            return [replace(micro, noise=micro.noise * scale) for micro in true(step)]

        return replace(run, feed=replace(run.feed, micros=micros), context=replace(run.context, guard="on_device"))

    straight = losing("straight")
    place.train(straight)
    found = outcome(straight)
    assert {event["kind"] for event in found["events.jsonl"]} >= {"spike", "jump", "not_finite"}
    assert found["state"].control.clip_scale == found["state"].rate_scale < 1.0
    for step in range(10):
        broken = losing("broken")
        place.resume(signal_at_step(broken, step))
    place.resume(broken)
    assert outcome(broken) == found


def stop_in_forward(run: Run, number: int) -> Run:
    """The same job, with a signal before its `number`th training forward pass."""
    predict, left = run.context.predict, [number]

    def counted(*arguments: Any) -> torch.Tensor:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return predict(*arguments)

    return replace(run, context=replace(run.context, predict=counted))


def test_a_checkpoint_whose_prediction_type_is_set_resumes_exactly(place, tmp_path, monkeypatch):
    """The header shows noise; the setting makes the run learn velocity, before and after the stop."""
    monkeypatch.setattr(tokenizers, "CLIP", tmp_path / "words")
    pipeline = tiny_pipeline(tmp_path / "words", "sd15", "epsilon")
    here = replace(place, model=write(unet_checkpoint(pipeline, "sd15"), tmp_path / "one.safetensors"))
    usual = {"data__resolution": 64, "lora__rank": 4}  # a checkpoint does not store its size
    velocity = {**usual, "model__prediction_type": "v_prediction", "noise__zero_terminal_snr": True}
    of_noise, straight = here.run("noise", steps=2, **usual), here.run("straight", steps=2, **velocity)
    for run in (of_noise, straight):
        here.train(run)
    state, _ = here.resume(signal_at_step(here.run("broken", steps=2, **velocity), 0))
    assert state.step == 1
    broken = here.run("broken", steps=2, **velocity)
    here.resume(broken)
    assert outcome(broken) == outcome(straight) != outcome(of_noise)


def test_stopped_inside_gradient_accumulation(place, makes):
    """Without time to finish the step it is aborted: none of its three micro-batches counts."""
    straight = makes("split", "straight")
    place.train(straight)
    for forward, step in ((2, 0), (5, 1), (6, 2)):  # the last is aborted before its third
        run = stop_in_forward(makes("split", "broken", train__grace_seconds=1e-6), forward)
        state, interrupt = place.resume(run)
        assert interrupt.signal == signal.SIGTERM
        assert state.step == step
    broken = makes("split", "broken")
    place.resume(broken)
    assert outcome(broken) == outcome(straight)


def test_resumed_with_another_checkpoint_interval_and_more_steps(place, makes):
    """A learning rate independent of the number of steps continues as if that had been known."""
    settings = {"validation__every_n_steps": 1, "checkpoint__every_n_steps": 3, "lr_scheduler__warmup_steps": 2}
    straight = makes("plain", "straight", **settings)
    place.train(straight)
    place.resume(signal_at_step(makes("plain", "broken", **settings, checkpoint__keep_last=1), 1))
    shorter = makes("plain", "broken", **{**settings, "checkpoint__every_n_steps": 1, "train__max_steps": 4})
    assert place.resume(shorter)[0].step == 4
    broken = makes("plain", "broken", **settings)
    place.resume(broken)
    assert outcome(broken) == outcome(straight)


WORDS = {
    "optimizer__name": names_for("optimizer.name"),
    "lr_scheduler__name": get_args(schema.SchedulerName),
    "memory__weight_dtype": get_args(schema.Precision),
    "loss__type": names_for("loss.type"),
    "loss__weighting": names_for("loss.weighting"),
    "data__crop": get_args(schema.CropName),
}
USUAL = {"optimizer__name": "adamw", "memory__weight_dtype": "fp32", "loss__type": "mse", "data__crop": "center"}
USUAL |= {"loss__weighting": "min_snr"}


@pytest.mark.parametrize("setting", WORDS)
def test_every_choice_of_a_setting_has_a_case(setting):
    assert {case.get(setting, USUAL.get(setting)) for case in CASES.values()} - {None} == set(WORDS[setting])


# Sections whose settings change a step, and those among them that act before any step or by choosing data.
OF_A_STEP = ("lora", "optimizer", "lr_scheduler", "noise", "loss", "captions", "data")
BEFORE_ANY_STEP = {
    "captions.extension",
    "captions.column",
    "lora.max_rank",
    "lora.network_weights",
    *(f"captions.{name}" for name in ("separator", "keep_tokens_separator", "prefix", "suffix")),
    *(f"data.{name}" for name in ("resolution", "resolution_ceiling", "allow_missing_captions", "allow_small_images")),
    *(f"data.{name}" for name in ("bucket_no_upscale", "max_aspect", "bucket_step", "bucket_min", "bucket_max")),
    *(f"data.{name}" for name in ("num_class_images", "class_prompts")),  # tests/recipes/test_class_images.py
}


def test_every_setting_that_changes_a_step_has_a_case():
    wanted = {name for name in setting_names() if name.partition(".")[0] in OF_A_STEP} - BEFORE_ANY_STEP
    required = {"lora.rank", "lora.type", "data.sources", "loss.weighting"}  # of all of them
    assert wanted - required == {key.replace("__", ".") for case in CASES.values() for key in case} & wanted - required


def test_every_family_has_a_case():
    assert {case.get("family", "sd15") for case in CASES.values()} >= set(FAMILIES)


@pytest.mark.parametrize("case", ["adamw8bit", pytest.param("paged_adamw8bit", marks=pytest.mark.slow)])
def test_8bit_state_is_8bit_before_and_after(case, place, makes):
    """In a run: as written, and in the resumed optimizer."""

    def kinds(optimizer: torch.optim.Optimizer) -> set[torch.dtype]:
        return {each.dtype for state in optimizer.state.values() for each in state.values() if torch.is_tensor(each)}

    first = signal_at_step(makes(case, "a"), 1)
    place.resume(first)
    assert torch.uint8 in kinds(first.context.optimizer)
    found, _ = newest_valid(first.checkpoints)
    assert found is not None
    second = makes(case, "a")
    place.resume(second)
    assert kinds(second.context.optimizer) == kinds(first.context.optimizer)


def test_fp16_overflows_again_where_it_overflowed(place, makes):
    """The scale halves and the step is skipped, before or after a stop. The scale continues from there."""

    def hot(name: str) -> Run:
        run = makes("fp16", name)
        run.context.scaler.load_state_dict(run.context.scaler.state_dict() | {"scale": 2.0**26})
        return run

    straight = hot("straight")
    place.train(straight)
    assert straight.context.scaler.get_scale() < 2.0**26
    for step in (0, 1, 3):
        place.resume(signal_at_step(hot("broken"), step))
    broken = makes("fp16", "broken")  # its scale comes from the checkpoint
    state, _ = place.resume(broken)
    assert state.skipped > 1
    assert broken.context.scaler.get_scale() == straight.context.scaler.get_scale()
    assert outcome(broken) == outcome(straight)
