"""The header of a LoRA file, for other programs and people. All values are strings.

Deterministic: the same facts give the same header; dates come from the caller.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from safetensors.torch import save

from lora_trainer.lora_format.keys import BASE_FORM, OWN_VERSION, T5_TOKENS, WITHOUT

if TYPE_CHECKING:
    from torch import Tensor

    from lora_trainer.lora_format.layer_updates import LayerUpdate
    from lora_trainer.lora_format.weights import AdapterWeights

PLAIN_TOKENS = 75  # the default, which programs do not record
EMA_DECAY, SWA_START = "lora_trainer.ema_decay", "lora_trainer.swa_start"
HASH = "modelspec.hash_sha256"  # of all tensors' bytes
LEGACY_FROM, LEGACY_BYTES = 0x100000, 0x10000


@dataclass(frozen=True)
class FlowFacts:
    """The training times of a flow. `shift` is a factor, or None for one that grows with the image."""

    timesteps: str
    logit_mean: float
    logit_spread: float
    mode_scale: float
    shift: float | None


@dataclass(frozen=True)
class TrainingFacts:
    """The facts of a run for the header of its LoRA.

    `started` and `finished` are seconds since 1970. `dataset_dirs` and `tag_frequency` hold
    folder names and captions; leave them empty to keep these private.
    """

    name: str
    base_version: str  # `sd_v1`, …: programs choose by it which models a LoRA is shown for
    architecture: str  # modelspec's name: `stable-diffusion-v1/lora`, …
    base_name: str  # the model's folder or file name
    alpha: float  # of the training: the tensors have their own
    targets: str  # lora.target_modules as text
    resolution: tuple[int, int]  # width, height in pixels
    steps: int
    epochs: int
    samples: int
    batch: int  # effective batch
    learning_rate: float
    optimizer: str
    schedule: str
    seed: int
    started: float
    finished: float
    version: str  # lora_trainer's
    base_form: str = ""  # the quantized form that the base model was stored in
    base_loras: str = ""  # files merged into it: `style.safetensors x 0.8`
    prediction: str = "epsilon"
    warmup_steps: int = 0
    mixed_precision: str = "no"
    checkpointing: bool = False
    min_snr_gamma: float | None = None
    loss_weighting: str = "min_snr"
    loss_type: str = "mse"
    huber_delta: float | None = None
    noise_offset: float | None = None
    multires_iterations: int | None = None
    multires_discount: float | None = None
    input_perturbation: float | None = None
    zero_terminal_snr: bool = False
    caption_dropout: float = 0.0
    caption_dropout_every_epochs: int = 0
    caption_tag_dropout: float = 0.0
    shuffle_captions: bool = False
    keep_tokens: int = 0
    flip: bool = False
    random_crop: bool = False
    recolored: bool = False
    no_upscale: bool = False
    bucket_sides: tuple[int | None, int | None] = (None, None)  # shortest and longest, in pixels
    regularization: int = 0  # samples that keep the model's own idea of a class, not among `samples`
    trigger: str | None = None
    dropout: float = 0.0
    rank_stabilized: bool = False
    network_args: Mapping[str, object] = field(default_factory=dict)  # LoRA+, T-LoRA, …, as kohya and LyCORIS name them
    ema_decay: float | None = None
    swa_start: int | None = None  # the step from which on weights were averaged
    validation_images: int = 0
    clip_skip: int | None = None
    max_tokens: int = PLAIN_TOKENS  # of a caption, that CLIP read
    t5_tokens: int | None = None
    without_t5: bool = False
    text_rates: tuple[float, ...] = ()  # learning rate of the LoRA on each text encoder, 0 for untrained ones
    text_alpha: float | None = None  # of the training, on text encoders
    flow: FlowFacts | None = None
    buckets: Mapping[tuple[int, int], int] = field(default_factory=dict)  # (width, height) -> samples
    dataset_dirs: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    tag_frequency: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


def header(facts: TrainingFacts, weights: AdapterWeights) -> dict[str, str]:
    """The header without hashes of a file with these tensors. Rank and alpha are those of most of the denoiser's."""
    width, height = facts.resolution
    own: dict[str, object] = {"targets": facts.targets, **facts.network_args}
    if facts.rank_stabilized:
        own["rank_stabilized"] = True
    has_texts = any(name.startswith("text_encoder") for name in weights.modules)
    values: dict[str, object] = {
        "ss_v2": facts.base_version.startswith("sd_v2"),
        "ss_base_model_version": facts.base_version,
        **network_entries(weights, own),
        "ss_network_dropout": facts.dropout or None,
        "ss_output_name": facts.name,
        "ss_sd_model_name": facts.base_name,
        "ss_clip_skip": facts.clip_skip,
        "ss_max_token_length": facts.max_tokens if facts.max_tokens != PLAIN_TOKENS else None,
        "ss_training_started_at": facts.started,
        "ss_training_finished_at": facts.finished,
        "ss_resolution": f"({width}, {height})",
        **_images(facts),
        "ss_dataset_dirs": json.dumps(facts.dataset_dirs, sort_keys=True),
        "ss_tag_frequency": json.dumps(facts.tag_frequency, sort_keys=True),
        "ss_num_train_images": facts.samples,
        "ss_num_reg_images": facts.regularization,
        "ss_total_batch_size": facts.batch,
        "ss_steps": facts.steps,
        "ss_max_train_steps": facts.steps,
        "ss_epoch": facts.epochs,
        "ss_num_epochs": facts.epochs,
        "ss_learning_rate": facts.learning_rate,
        "ss_unet_lr": facts.learning_rate,
        "ss_text_encoder_lr": list(facts.text_rates) if any(facts.text_rates) else None,
        "ss_optimizer": facts.optimizer,
        "ss_lr_scheduler": facts.schedule,
        "ss_lr_warmup_steps": facts.warmup_steps,
        "ss_mixed_precision": facts.mixed_precision,
        "ss_gradient_checkpointing": facts.checkpointing,
        **_loss_and_noise(facts),
        "ss_seed": facts.seed,
        "ss_training_comment": None,
        **_specification(facts),
        **_flow(facts.flow),
        OWN_VERSION: facts.version,
        "lora_trainer.alpha": facts.alpha,
        "lora_trainer.text_encoder_alpha": facts.text_alpha if has_texts else None,
        EMA_DECAY: facts.ema_decay,
        "lora_trainer.validation_images": facts.validation_images,
    }
    not_always = {
        BASE_FORM: facts.base_form or None,
        "lora_trainer.base_loras": facts.base_loras or None,
        T5_TOKENS: facts.t5_tokens,
        SWA_START: facts.swa_start,
        WITHOUT: facts.without_t5 or None,
    }
    values |= {key: value for key, value in not_always.items() if value is not None}
    # kohya writes Python's own text of each value, and its readers look for "None", "True" and "False".
    return {key: str(value) for key, value in values.items()}


def _most(pairs: Collection[LayerUpdate]) -> tuple[int | None, float | None]:
    """Rank and alpha of most of these modules."""
    return Counter((pair.rank, pair.alpha) for pair in pairs).most_common(1)[0][0] if pairs else (None, None)


def network_entries(weights: AdapterWeights, own: Mapping[str, object]) -> dict[str, object]:
    """The entries on kind, rank and alpha of a file's tensors, with `own` arguments of the network; the commonest of its kinds."""
    texts = [pair for name, pair in weights.modules.items() if name.startswith("text_encoder")]
    denoiser = [pair for name, pair in weights.modules.items() if not name.startswith("text_encoder")]
    rank, alpha = _most(denoiser or texts)
    kinds = Counter((update.algorithm, tuple(update.arguments.items())) for update in weights.modules.values())
    algo, extra = kinds.most_common(1)[0][0] if kinds else ("lora", ())
    arguments: dict[str, object] = {"algo": algo, "alpha_folded": True, **own, **dict(extra)}
    if texts:
        arguments["text_encoder_dim"], arguments["text_encoder_alpha"] = _most(texts)
    return {
        "ss_network_module": "networks.lora" if algo == "lora" else "lycoris.kohya",
        "ss_network_dim": rank,
        "ss_network_alpha": alpha,
        "ss_network_args": json.dumps(arguments, sort_keys=True),
    }


def _specification(facts: TrainingFacts) -> dict[str, object]:
    """The model specification 1.0.1; a flow has no prediction type there."""
    width, height = facts.resolution
    values: dict[str, object] = {
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.architecture": facts.architecture,
        "modelspec.implementation": "diffusers",
        "modelspec.title": facts.name,
        "modelspec.resolution": f"{width}x{height}",
        "modelspec.date": datetime.fromtimestamp(int(facts.finished), UTC).replace(tzinfo=None).isoformat(),
    }
    if facts.prediction != "flow":
        values["modelspec.prediction_type"] = "v" if facts.prediction == "v_prediction" else "epsilon"
    if facts.trigger:
        values["modelspec.trigger_phrase"] = facts.trigger
    return values


def _flow(flow: FlowFacts | None) -> dict[str, object]:
    """As sd-scripts names it, which calls plain times `none` and a shift by the image's size `flux_shift`."""
    if flow is None:
        return {}
    return {
        "ss_timestep_sampling": "flux_shift" if flow.shift is None else "sigma",
        "ss_weighting_scheme": "none" if flow.timesteps == "uniform" else flow.timesteps,
        "ss_logit_mean": flow.logit_mean,
        "ss_logit_std": flow.logit_spread,
        "ss_mode_scale": flow.mode_scale,
        "ss_discrete_flow_shift": flow.shift,
        "ss_model_prediction_type": "raw",
    }


def _images(facts: TrainingFacts) -> dict[str, object]:
    rows = {
        str(index): {"resolution": list(size), "count": count}
        for index, (size, count) in enumerate(sorted(facts.buckets.items()))
    }
    return {
        "ss_bucket_info": json.dumps({"buckets": rows} if rows else {}),
        "ss_enable_bucket": bool(facts.buckets),
        "ss_bucket_no_upscale": facts.no_upscale,
        "ss_min_bucket_reso": facts.bucket_sides[0],
        "ss_max_bucket_reso": facts.bucket_sides[1],
        "ss_flip_aug": facts.flip,
        "ss_random_crop": facts.random_crop,
        "ss_color_aug": facts.recolored,
    }


def _loss_and_noise(facts: TrainingFacts) -> dict[str, object]:
    return {
        "ss_min_snr_gamma": facts.min_snr_gamma,
        "ss_debiased_estimation": facts.loss_weighting == "debiased",
        "ss_loss_type": "l2" if facts.loss_type == "mse" else facts.loss_type,
        "ss_huber_c": facts.huber_delta,
        "ss_noise_offset": facts.noise_offset,
        "ss_ip_noise_gamma": facts.input_perturbation,
        "ss_zero_terminal_snr": facts.zero_terminal_snr,
        "ss_multires_noise_iterations": facts.multires_iterations,
        "ss_multires_noise_discount": facts.multires_discount,
        "ss_caption_dropout_rate": facts.caption_dropout,
        "ss_caption_dropout_every_n_epochs": facts.caption_dropout_every_epochs,
        "ss_caption_tag_dropout_rate": facts.caption_tag_dropout,
        "ss_shuffle_caption": facts.shuffle_captions,
        "ss_keep_tokens": facts.keep_tokens,
    }


def with_hashes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, str]:
    """The header with kohya's two hashes of the tensors as they will be written (after the last cast)."""
    training = {key: value for key, value in metadata.items() if key.startswith("ss_")}
    # With memory of their own: layers that share one, as those with equal halves do after `resize`, are refused by safetensors.
    content = save({key: tensor.contiguous().clone() for key, tensor in tensors.items()}, training)
    after_header = 8 + int.from_bytes(content[:8], "little")
    legacy = hashlib.sha256(content[LEGACY_FROM : LEGACY_FROM + LEGACY_BYTES]).hexdigest()[:8]
    return {
        **metadata,
        "sshs_model_hash": hashlib.sha256(content[after_header:]).hexdigest(),
        "sshs_legacy_hash": legacy,
    }
