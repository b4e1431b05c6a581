"""Tiny models with published values for what checkpoints do not store: head sizes, norm groups, scales, schedules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLFlux2,
    AutoencoderKLQwenImage,
    AutoencoderKLQwenImage21,
    ChromaPipeline,
    ChromaTransformer2DModel,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Transformer2DModel,
    FluxPipeline,
    FluxTransformer2DModel,
    Krea2Pipeline,
    Krea2Transformer2DModel,
    PNDMScheduler,
    QwenImage21Transformer2DModel,
    QwenImageEditPipeline,
    QwenImageEditPlusPipeline,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLModel,
    T5Config,
    T5EncoderModel,
)

from builtin_base.architecture import make_tokenizer
from lora_trainer.models.published import public_architecture
from tests.lora_format import tiny
from tests.lora_format.tiny import (
    FLUX2_WIDTH,
    QWEN_SCHEDULE,
    T5_WIDTH,
    qwen_edit_tokenizer,
    qwen_tokenizer,
    t5_tokenizer,
    tiny_qwen,
)

SCHEDULE = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}
UNETS: dict[str, dict[str, Any]] = {
    "sd15": {"block_out_channels": (32, 64), "cross_attention_dim": 64, "attention_head_dim": 8},
    "sd2": {"block_out_channels": (64, 128), "cross_attention_dim": 1024, "attention_head_dim": (1, 2)},
    "sdxl": {
        "block_out_channels": (64, 128),
        "cross_attention_dim": 64 + 128,
        "attention_head_dim": (1, 2),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "transformer_layers_per_block": (1, 2),
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 6 * 256 + 64,
    },
}
UNETS["sd2"] |= {"use_linear_projection": True, "upcast_attention": True, "sample_size": 96}
UNETS["sdxl"] |= {"use_linear_projection": True, "sample_size": 128}


def tiny_unet(family: str) -> UNet2DConditionModel:
    """With published counts of heads and groups, which no file stores."""
    usual = {
        "sample_size": 64,
        "layers_per_block": 2,
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    }
    return UNet2DConditionModel(**(usual | UNETS[family]))


def tiny_vae(**more: Any) -> AutoencoderKL:
    usual: dict[str, Any] = {
        "block_out_channels": (32, 32, 32, 64),
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "layers_per_block": 1,
        "latent_channels": 4,
    }
    return AutoencoderKL(**(usual | more))


def clip_config(tokenizer: CLIPTokenizer, width: int, activation: str, layers: int = 2) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        hidden_act=activation,
        projection_dim=64,
        eos_token_id=2,
        bos_token_id=0,
        pad_token_id=1,
    )


def tiny_pipeline(folder: Path, family: str, prediction: str = "epsilon", *, zero_terminal: bool = False) -> Any:
    """A pipeline with random weights, of tiny widths."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer(folder)
    schedule = {**SCHEDULE, "prediction_type": prediction}
    parts: dict[str, Any] = {"unet": tiny_unet(family), "tokenizer": tokenizer}
    if family == "sdxl":
        second = make_tokenizer(folder.with_name(folder.name + "2"))
        second.pad_token = "!"
        return StableDiffusionXLPipeline(
            **parts,
            vae=tiny_vae(scaling_factor=0.13025),
            text_encoder=CLIPTextModel(clip_config(tokenizer, 64, "quick_gelu")),
            text_encoder_2=CLIPTextModelWithProjection(clip_config(tokenizer, 128, "gelu")),
            tokenizer_2=second,
            scheduler=EulerDiscreteScheduler(**schedule, rescale_betas_zero_snr=zero_terminal),
            add_watermarker=False,
        )
    if family == "sd2":
        tokenizer.pad_token = "!"
        text = CLIPTextModel(clip_config(tokenizer, 1024, "gelu", layers=1))
    else:
        text = CLIPTextModel(clip_config(tokenizer, 64, "quick_gelu"))
    nothing = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    scheduler = PNDMScheduler(**schedule, skip_prk_steps=True)
    return StableDiffusionPipeline(**parts, vae=tiny_vae(), text_encoder=text, scheduler=scheduler, **nothing)


FLOWS: dict[str, dict[str, Any]] = {
    "sd3": {},
    "sd3.5": {"qk_norm": "rms_norm", "dual_attention_layers": (0,)},
    "flux-dev": {"guidance_embeds": True},
    "flux-schnell": {"guidance_embeds": False},
}


def tiny_flow_pipeline(folder: Path, kind: str) -> Any:
    """SD3 and FLUX.1, of the flavors in `FLOWS`."""
    torch.manual_seed(0)
    tokenizer, words = make_tokenizer(folder), t5_tokenizer()
    t5_config = T5Config(vocab_size=len(words), feed_forward_proj="gated-gelu", d_model=256, d_kv=64, num_heads=2)
    t5_config.num_layers, t5_config.d_ff = 2, 64
    t5 = T5EncoderModel(t5_config)
    first = clip_config(tokenizer, 64, "quick_gelu")
    vae = {"latent_channels": 16, "use_quant_conv": False, "use_post_quant_conv": False}
    layers = {"num_layers": 2, "joint_attention_dim": 256}
    if kind.startswith("flux"):
        sizes = {"num_single_layers": 2, "num_attention_heads": 1, "pooled_projection_dim": 64}
        moving = {"shift": 3.0, "use_dynamic_shifting": True} if kind == "flux-dev" else {"shift": 1.0}
        return FluxPipeline(
            transformer=FluxTransformer2DModel(**layers, **sizes, **FLOWS[kind]),
            vae=tiny_vae(**vae, scaling_factor=0.3611, shift_factor=0.1159),
            text_encoder=CLIPTextModel(first),
            text_encoder_2=t5,
            tokenizer=tokenizer,
            tokenizer_2=words,
            scheduler=FlowMatchEulerDiscreteScheduler(**moving),
        )
    second_words = make_tokenizer(folder.with_name(folder.name + "2"))
    second_words.pad_token = "!"
    wide = clip_config(tokenizer, 128, "gelu")
    wide.projection_dim = 128
    encoder = CLIPTextModelWithProjection(first)
    with torch.no_grad():  # of which a checkpoint holds nothing
        encoder.text_projection.weight.copy_(torch.eye(64))
    sizes = {"num_attention_heads": 2, "pooled_projection_dim": 192, "caption_projection_dim": 128, "out_channels": 16}
    return StableDiffusion3Pipeline(
        transformer=SD3Transformer2DModel(**layers, **sizes, pos_embed_max_size=24, **FLOWS[kind]),
        vae=tiny_vae(**vae, scaling_factor=1.5305, shift_factor=0.0609),
        text_encoder=encoder,
        text_encoder_2=CLIPTextModelWithProjection(wide),
        text_encoder_3=t5,
        tokenizer=tokenizer,
        tokenizer_2=second_words,
        tokenizer_3=words,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    )


def tiny_chroma(folder: Path) -> Any:
    """With published head sizes, which no file stores."""
    flux = tiny_flow_pipeline(folder, "flux-schnell")
    sizes = {"num_layers": 2, "num_single_layers": 2, "num_attention_heads": 1, "joint_attention_dim": 256}
    return ChromaPipeline(
        vae=flux.vae,
        text_encoder=flux.text_encoder_2,
        tokenizer=flux.tokenizer_2,
        transformer=ChromaTransformer2DModel(**sizes, approximator_hidden_dim=64, approximator_layers=2),
        scheduler=flux.scheduler,
    )


def tiny_flux2(folder: Path, *, distilled: bool = False) -> Any:
    """With published head sizes, which no file stores."""
    make_tokenizer(folder)  # of CLIP, for the package
    sizes = {"num_layers": 2, "num_single_layers": 2, "num_attention_heads": 1, "joint_attention_dim": 3 * FLUX2_WIDTH}
    vae = {"block_out_channels": (32, 32), "down_block_types": ("DownEncoderBlock2D",) * 2, "layers_per_block": 2}
    return Flux2KleinPipeline(
        vae=AutoencoderKLFlux2(**vae, up_block_types=("UpDecoderBlock2D",) * 2),
        text_encoder=tiny_qwen(layers=27, width=FLUX2_WIDTH),
        tokenizer=qwen_tokenizer(),
        transformer=Flux2Transformer2DModel(**{**public_architecture("flux2").denoiser, **sizes}),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        is_distilled=distilled,
    )


def tiny_z_image(folder: Path) -> Any:
    """With published positions and head sizes, which no file stores."""
    vae = tiny_flow_pipeline(folder, "flux-dev").vae
    sizes = {"dim": 128, "n_heads": 1, "n_kv_heads": 1, "n_layers": 2, "n_refiner_layers": 1, "cap_feat_dim": T5_WIDTH}
    return ZImagePipeline(
        vae=vae,
        text_encoder=tiny_qwen(),
        tokenizer=qwen_tokenizer(),
        transformer=ZImageTransformer2DModel(**{**public_architecture("z_image").denoiser, **sizes}),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    )


def tiny_qwen_image(edit: str = "") -> Any:
    """With published positions and head sizes, which no file stores; `edit` as in `model.flavor`."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 1}
    places = {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1000000.0}
    vision = {"depth": 1, "hidden_size": 80, "intermediate_size": 16, "num_heads": 1, "out_hidden_size": 128}
    tokenizer = qwen_edit_tokenizer() if edit else qwen_tokenizer()
    text = {**sizes, "num_key_value_heads": 1, "vocab_size": len(tokenizer), "rope_parameters": places}
    text["rms_norm_eps"] = 1e-6
    seen = {"image_token_id": tokenizer.convert_tokens_to_ids("<|image_pad|>")} if edit else {}
    encoder = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision, **seen))
    heads = {"num_attention_heads": 1, "num_layers": 2, "joint_attention_dim": 128}
    parts = {
        "vae": AutoencoderKLQwenImage(base_dim=4),
        "text_encoder": encoder.eval(),
        "tokenizer": tokenizer,
        "transformer": QwenImageTransformer2DModel(**heads, zero_cond_t=edit.endswith("2511")),
        "scheduler": FlowMatchEulerDiscreteScheduler(**QWEN_SCHEDULE),
    }
    if not edit:
        return QwenImagePipeline(**parts)
    most = {"min_pixels": 3136, "max_pixels": 12845056}  # as published
    kind = QwenImageEditPipeline if edit == "edit" else QwenImageEditPlusPipeline
    return kind(**parts, processor=Qwen2VLImageProcessorPil(**most))


def tiny_qwen_image21() -> Any:
    """As `tiny_qwen_image`, with the whole text encoder."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 1}
    places = {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True, "rope_theta": 5000000.0}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 1, "out_hidden_size": 128}
    text = {**sizes, "num_key_value_heads": 1, "vocab_size": len(qwen_tokenizer()), "rope_parameters": places}
    config = Qwen3VLConfig(text_config=text, vision_config={**vision, "deepstack_visual_indexes": [0]})
    pipeline = tiny.tiny_qwen_image21("qwen_image21")
    pipeline.text_encoder = Qwen3VLForConditionalGeneration(config).eval()
    pipeline.vae = AutoencoderKLQwenImage21(base_dim=4, decoder_base_dim=6)
    pipeline.transformer = QwenImage21Transformer2DModel(num_attention_heads=1, num_layers=2, context_in_dim=128)
    torch.nn.init.normal_(pipeline.transformer.txt_in.text_norm.weight)  # zeros at the start
    return pipeline


def tiny_krea2(*, turbo: bool = False) -> Any:
    """As `tiny_qwen_image`; 36 layers of text, of which twelve are read."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 16, "num_hidden_layers": 36, "num_attention_heads": 1}
    places = {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True, "rope_theta": 5000000.0}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 1, "out_hidden_size": 128}
    text = {**sizes, "num_key_value_heads": 1, "vocab_size": len(qwen_tokenizer()), "rope_parameters": places}
    encoder = Qwen3VLModel(Qwen3VLConfig(text_config=text, vision_config={**vision, "deepstack_visual_indexes": [0]}))
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 64}
    own = {"text_hidden_dim": 128, "text_num_attention_heads": 1, "text_num_key_value_heads": 1}
    own |= {"text_intermediate_size": 64, "num_layerwise_text_blocks": 1, "num_refiner_text_blocks": 1}
    transformer = Krea2Transformer2DModel(**heads, **own, num_layers=2)
    for name, each in transformer.named_parameters():
        if name.endswith("scale_shift_table"):  # zeros at the start
            torch.nn.init.normal_(each)
    return Krea2Pipeline(
        vae=AutoencoderKLQwenImage(base_dim=4),
        text_encoder=encoder.eval(),
        tokenizer=qwen_tokenizer(),
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, max_image_seq_len=6400),
        is_distilled=turbo,
    )


def tiny_anima() -> Any:
    """With published values where no file stores them: the VAE's attention, the channels of each head."""
    torch.manual_seed(0)
    pipeline = tiny.tiny_anima()
    pipeline.update_components(vae=AutoencoderKLQwenImage(base_dim=4))
    return pipeline
