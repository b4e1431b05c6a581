"""Tiny random pipelines of every family, and LoRAs for them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from diffusers import (
    AnimaTextConditioner,
    AutoencoderKL,
    AutoencoderKLFlux2,
    AutoencoderKLQwenImage,
    AutoencoderKLQwenImage21,
    ChromaPipeline,
    ChromaTransformer2DModel,
    CosmosTransformer3DModel,
    DDIMScheduler,
    DiffusionPipeline,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Transformer2DModel,
    FluxKontextPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
    Krea2Pipeline,
    Krea2Transformer2DModel,
    QwenImage21Pipeline,
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
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen2VLImageProcessorPil,
    Qwen3Config,
    Qwen3Model,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLModel,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

from builtin_base.architecture import make_scheduler, make_tokenizer
from lora_trainer.lora_format.kinds.lora import LoraPair
from lora_trainer.lora_format.metadata import TrainingFacts
from lora_trainer.lora_format.weights import LoraWeights, module_name, shapes_of
from tests.families.own import own_families

ENDINGS = ("to_q", "to_k", "to_v", "to_out.0")
SD2_TEXT_WIDTH = 1024  # what 2.x is known by, also in miniature
UNETS: dict[str, dict[str, Any]] = {
    "sd15": {"cross_attention_dim": 32, "attention_head_dim": 4},
    "sd2": {"cross_attention_dim": SD2_TEXT_WIDTH, "attention_head_dim": (2, 4), "use_linear_projection": True},
    "sdxl": {
        "cross_attention_dim": 32 + 24,
        "attention_head_dim": (2, 4),
        "use_linear_projection": True,
        "transformer_layers_per_block": (2, 1),
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 6 * 8 + 16,
    },
}
T5_WIDTH, FLUX2_WIDTH, POOLED = 64, 16, 16
# Flavors of the families with a transformer: their differences from the plain one.
TRANSFORMERS: dict[str, dict[str, Any]] = {
    "sd3": {},
    "sd3-without-t5": {},
    "sd3.5": {"qk_norm": "rms_norm", "dual_attention_layers": (0,)},
    "flux": {"guidance_embeds": True},
    "flux-schnell": {"guidance_embeds": False},
    "flux-kontext": {"guidance_embeds": True},
    "flux2": {},
    "flux2-distilled": {},
    "chroma": {},
    "z_image": {},
    "qwen_image": {},
    "qwen_image-edit": {},
    "qwen_image-edit-plus": {"zero_cond_t": True},
    "qwen_image21": {},
    "qwen_image21-turbo": {},
    "krea2": {},
    "krea2-turbo": {},
    "anima": {},
}
# As published: by the size of the image, and never quite to the end.
QWEN_SCHEDULE: dict[str, Any] = {
    "use_dynamic_shifting": True,
    "base_shift": 0.5,
    "max_shift": 0.9,
    "max_image_seq_len": 8192,
    "shift_terminal": 0.02,
}
CHAT = (
    "{% for said in messages %}<|im_start|>{{ said.role }}\n{{ said.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def tiny_pipeline(folder: Path, family: str = "sd15") -> DiffusionPipeline:
    """A family's pipeline with random weights; the tokenizer's files go into `folder`."""
    torch.manual_seed(0)
    if family in own_families():
        pipeline = own_families()[family].tiny_pipeline()
        pipeline.set_progress_bar_config(disable=True)
        return pipeline
    tokenizer = make_tokenizer(folder)
    if family in TRANSFORMERS:
        return tiny_flow_pipeline(tokenizer, family)
    if family == "sdxl":
        texts: dict[str, Any] = {
            "text_encoder": CLIPTextModel(text_config(tokenizer, 32, layers=2)),
            "text_encoder_2": CLIPTextModelWithProjection(text_config(tokenizer, 24, layers=2, projection_dim=16)),
            "tokenizer_2": tokenizer,
        }
    else:
        texts = {"text_encoder": CLIPTextModel(text_config(tokenizer, SD2_TEXT_WIDTH if family == "sd2" else 32))}
    parts = {**texts, "tokenizer": tokenizer, "unet": tiny_unet(family), "vae": tiny_vae()}
    if family == "sdxl":
        scheduler = EulerDiscreteScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
        pipeline = StableDiffusionXLPipeline(**parts, scheduler=scheduler, add_watermarker=False)
    else:
        prediction = "v_prediction" if family == "sd2" else "epsilon"
        scheduler = DDIMScheduler.from_config(make_scheduler().config, prediction_type=prediction)
        nothing = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
        pipeline = StableDiffusionPipeline(**parts, scheduler=scheduler, **nothing)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def tiny_flow_pipeline(tokenizer: CLIPTokenizer, kind: str) -> DiffusionPipeline:
    """A tiny pipeline with a transformer, of the flavors in `TRANSFORMERS`."""
    if kind == "anima":
        return tiny_anima()
    if kind.startswith("qwen_image21"):
        return tiny_qwen_image21(kind)
    parts: dict[str, Any] = {
        "vae": tiny_vae(16, use_quant_conv=False, use_post_quant_conv=False, scaling_factor=0.5, shift_factor=0.1),
        "transformer": tiny_transformer(kind),
        "tokenizer": tokenizer,
    }
    if kind == "qwen_image":
        words: dict[str, Any] = {"tokenizer": qwen_tokenizer(), "text_encoder": tiny_qwen_vl(), "vae": tiny_video_vae()}
        pipeline = QwenImagePipeline(**{**parts, **words}, scheduler=FlowMatchEulerDiscreteScheduler(**QWEN_SCHEDULE))
    elif kind.startswith("qwen_image-"):
        pipeline = tiny_edit_pipeline(kind, parts["transformer"])
    elif kind.startswith("krea2"):
        words = {"tokenizer": qwen_tokenizer(), "text_encoder": tiny_qwen3_vl(), "vae": tiny_video_vae()}
        scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, max_image_seq_len=6400)
        turbo = kind == "krea2-turbo"
        pipeline = Krea2Pipeline(
            **{**parts, **words}, scheduler=scheduler, text_encoder_select_layers=(2, 5), is_distilled=turbo
        )
    elif kind == "z_image":
        words = {"tokenizer": qwen_tokenizer(), "text_encoder": tiny_qwen()}
        pipeline = ZImagePipeline(**{**parts, **words}, scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0))
    elif kind == "chroma":
        words = {"text_encoder": tiny_t5(), "tokenizer": t5_tokenizer()}
        pipeline = ChromaPipeline(
            **{**parts, **words}, scheduler=FlowMatchEulerDiscreteScheduler(use_beta_sigmas=False)
        )
    elif kind.startswith("flux2"):
        pipeline = Flux2KleinPipeline(
            vae=tiny_flux2_vae(),
            transformer=parts["transformer"],
            text_encoder=tiny_qwen(layers=36, width=FLUX2_WIDTH),
            tokenizer=qwen_tokenizer(),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
            is_distilled=kind != "flux2",
        )
    elif kind.startswith("flux"):
        moving = {} if kind == "flux-schnell" else {"use_dynamic_shifting": True}
        pipeline = (FluxKontextPipeline if kind == "flux-kontext" else FluxPipeline)(
            **parts,
            text_encoder=CLIPTextModel(text_config(tokenizer, POOLED)),
            text_encoder_2=tiny_t5(),
            tokenizer_2=t5_tokenizer(),
            scheduler=FlowMatchEulerDiscreteScheduler(**moving),
        )
    else:
        widths, t5 = (32, 24), kind != "sd3-without-t5"
        clips = (text_config(tokenizer, width, layers=2, projection_dim=width // 2) for width in widths)
        first, second = (CLIPTextModelWithProjection(config) for config in clips)
        pipeline = StableDiffusion3Pipeline(
            **parts,
            text_encoder=first,
            text_encoder_2=second,
            text_encoder_3=tiny_t5() if t5 else None,
            tokenizer_2=tokenizer,
            tokenizer_3=t5_tokenizer() if t5 else None,
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def tiny_anima() -> Any:
    """Of modular blocks, whose pipeline takes no Path to save to."""
    from diffusers import AnimaAutoBlocks  # imports all modular pipelines, which takes seconds

    pipeline = AnimaAutoBlocks().init_pipeline()
    pipeline.update_components(
        vae=tiny_video_vae(),
        transformer=tiny_transformer("anima"),
        text_encoder=tiny_qwen(),
        tokenizer=qwen_tokenizer(),
        text_conditioner=tiny_conditioner(),
        t5_tokenizer=t5_tokenizer(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    )
    save = pipeline.save_pretrained
    pipeline.save_pretrained = lambda folder, **how: save(str(folder), overwrite_modular_index=True, **how)
    return pipeline


class WholeReader:
    """transformers' `Qwen3VLProcessor` as far as texts go: the whole one needs torchvision."""

    def __init__(self, tokenizer: Qwen2Tokenizer) -> None:
        self.tokenizer = tokenizer

    def __call__(self, text: list[str], **how: Any) -> Any:
        return self.tokenizer(text, **how)

    def apply_chat_template(self, messages: list[dict[str, Any]], **how: Any) -> Any:
        texts = [{"role": each["role"], "content": each["content"][0]["text"]} for each in messages]
        return [self.tokenizer.apply_chat_template(texts, **how)]


def tiny_qwen_image21(kind: str) -> DiffusionPipeline:
    """Qwen-Image 2.1 or its Turbo, with the whole text encoder."""
    turbo = kind.endswith("turbo")
    pipeline = QwenImage21Pipeline(
        vae=tiny_rgba_vae(),
        text_encoder=tiny_qwen3_vl(whole=True),
        processor=WholeReader(qwen_tokenizer()),
        transformer=tiny_transformer(kind),
        scheduler=FlowMatchEulerDiscreteScheduler(**({} if turbo else QWEN_SCHEDULE)),
        sample_sigmas=[1.0, 0.6, 0.2] if turbo else None,
    )
    pipeline.set_progress_bar_config(disable=True)
    save = pipeline.save_pretrained

    def save_whole(folder: Path, **how: Any) -> None:
        save(folder, **how)
        pipeline.processor.tokenizer.save_pretrained(folder / "processor")

    pipeline.save_pretrained = save_whole
    return pipeline


def tiny_conditioner() -> AnimaTextConditioner:
    sizes = {"source_dim": T5_WIDTH, "target_dim": T5_WIDTH, "model_dim": T5_WIDTH, "num_layers": 2}
    return AnimaTextConditioner(**sizes, num_attention_heads=4, target_vocab_size=len(t5_tokenizer()))


def tiny_edit_pipeline(kind: str, transformer: torch.nn.Module) -> DiffusionPipeline:
    """Qwen-Image-Edit, or Edit-2511. Of its processing class the part that prepares images: the whole one needs torchvision."""
    tokenizer = qwen_edit_tokenizer()
    return (QwenImageEditPlusPipeline if kind.endswith("plus") else QwenImageEditPipeline)(
        vae=tiny_video_vae(),
        text_encoder=tiny_qwen_vl(tokenizer),
        tokenizer=tokenizer,
        processor=Qwen2VLImageProcessorPil(),
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(**QWEN_SCHEDULE),
    )


def tiny_transformer(kind: str) -> torch.nn.Module:
    """The middle of the table of positions of `sd3.5` is what is kept of it, as of the published ones."""
    if kind in own_families():
        return cast("torch.nn.Module", own_families()[kind].tiny_transformer())
    if kind == "z_image":
        sizes: dict[str, Any] = {"dim": 32, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2}
        places = {"axes_dims": (4, 6, 6), "axes_lens": (1024, 256, 256)}
        return ZImageTransformer2DModel(**sizes, **places, cap_feat_dim=T5_WIDTH)
    if kind.startswith("flux2"):
        sizes = {"in_channels": 128, "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16}
        sizes |= {"num_attention_heads": 2, "joint_attention_dim": 3 * FLUX2_WIDTH, "axes_dims_rope": (4, 4, 4, 4)}
        return Flux2Transformer2DModel(**sizes, timestep_guidance_channels=16, guidance_embeds=False)
    if kind.startswith("qwen_image21"):
        heads = {"num_attention_heads": 2, "attention_head_dim": 16, "axes_dims_rope": (4, 6, 6)}
        return QwenImage21Transformer2DModel(**heads, num_layers=2, context_in_dim=T5_WIDTH)
    if kind.startswith("qwen_image"):
        heads = {"num_attention_heads": 2, "attention_head_dim": 16, "axes_dims_rope": (4, 6, 6)}
        own = {"num_layers": 2, "joint_attention_dim": T5_WIDTH, **TRANSFORMERS[kind]}
        return QwenImageTransformer2DModel(**heads, **own)
    if kind.startswith("krea2"):
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "attention_head_dim": 16, "intermediate_size": 48}
        text = {"text_hidden_dim": T5_WIDTH, "num_text_layers": 2, "text_intermediate_size": 48}
        text |= {"text_num_attention_heads": 2, "text_num_key_value_heads": 2}
        text |= {"num_layerwise_text_blocks": 1, "num_refiner_text_blocks": 1, "timestep_embed_dim": 32}
        return Krea2Transformer2DModel(**heads, **text, num_layers=2, axes_dims_rope=(4, 6, 6))
    if kind == "anima":
        heads = {"num_attention_heads": 2, "attention_head_dim": 16, "adaln_lora_dim": 8}
        places = {"rope_scale": (1.0, 4.0, 4.0), "extra_pos_embed_type": None}
        return CosmosTransformer3DModel(**heads, **places, num_layers=2, text_embed_dim=T5_WIDTH)
    common: dict[str, Any] = {"attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": T5_WIDTH}
    if kind == "chroma":
        layers = {"num_layers": 2, "num_single_layers": 2, "axes_dims_rope": (4, 6, 6)}
        return ChromaTransformer2DModel(**common, **layers, approximator_hidden_dim=32, approximator_layers=1)
    if kind.startswith("flux"):
        layers = {"num_layers": 2, "num_single_layers": 2, "pooled_projection_dim": POOLED, "axes_dims_rope": (4, 6, 6)}
        return FluxTransformer2DModel(**common, **layers, **TRANSFORMERS[kind])
    layers = {"num_layers": 2, "pooled_projection_dim": 16 + 12, "caption_projection_dim": 32, "sample_size": 8}
    side = 136 if kind == "sd3.5" else 24
    return SD3Transformer2DModel(**common, **layers, out_channels=16, pos_embed_max_size=side, **TRANSFORMERS[kind])


def tiny_t5() -> T5EncoderModel:
    sizes = {"d_model": T5_WIDTH, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 2}
    return T5EncoderModel(T5Config(vocab_size=len(t5_tokenizer()), feed_forward_proj="gated-gelu", **sizes))


def tiny_qwen(layers: int = 3, width: int = T5_WIDTH) -> Qwen3Model:
    sizes = {"hidden_size": width, "intermediate_size": width, "num_hidden_layers": layers, "head_dim": 16}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}
    heads["rope_parameters"] = {"rope_type": "default", "rope_theta": 1000000.0}
    return Qwen3Model(Qwen3Config(vocab_size=len(qwen_tokenizer()), **sizes, **heads))


def tiny_qwen_vl(tokenizer: Qwen2Tokenizer | None = None) -> Qwen2_5_VLForConditionalGeneration:
    """With the half that sees images, as published."""
    images = {} if tokenizer is None else {"image_token_id": tokenizer.convert_tokens_to_ids("<|image_pad|>")}
    tokenizer = tokenizer or qwen_tokenizer()
    sizes = {"hidden_size": T5_WIDTH, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    places = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1000000.0}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 1, "out_hidden_size": T5_WIDTH}
    text = {**sizes, "num_key_value_heads": 1, "vocab_size": len(tokenizer), "rope_parameters": places}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, **images)
    return Qwen2_5_VLForConditionalGeneration(config).eval()


def tiny_qwen3_vl(*, whole: bool = False) -> Qwen3VLModel | Qwen3VLForConditionalGeneration:
    """Of whose six layers Krea 2 reads two; the `whole` one also writes text."""
    sizes = {"hidden_size": T5_WIDTH, "intermediate_size": 64, "num_hidden_layers": 6, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": len(qwen_tokenizer())}
    places = {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True, "rope_theta": 5000000.0}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 1, "out_hidden_size": T5_WIDTH}
    text = {**sizes, **heads, "rope_parameters": places}
    config = Qwen3VLConfig(text_config=text, vision_config={**vision, "deepstack_visual_indexes": [0]})
    return (Qwen3VLForConditionalGeneration if whole else Qwen3VLModel)(config).eval()


def qwen_tokenizer() -> Qwen2Tokenizer:
    """A byte tokenizer with chat tokens and a chat template."""
    letters = {letter: place for place, letter in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Qwen2Tokenizer(vocab=letters, merges=[], model_max_length=1024)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = CHAT
    return tokenizer


def qwen_edit_tokenizer() -> Qwen2Tokenizer:
    """The same with the tokens around an image."""
    tokenizer = qwen_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]})
    return tokenizer


def t5_tokenizer() -> T5TokenizerFast:
    """A tokenizer of letters and a few words, with T5's special tokens at its ids."""
    words = [(f"▁{word}", -6.0) for word in "a ring on background picture red green blue".split()]
    letters = [(chr(code), -8.0) for code in range(33, 127)]
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), *words, *letters]
    return T5TokenizerFast(vocab=vocabulary, extra_ids=4, model_max_length=512)


def text_config(tokenizer: CLIPTokenizer, width: int, *, layers: int = 1, **more: int) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=2,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **more,
    )


def tiny_unet(family: str) -> UNet2DConditionModel:
    return UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        norm_num_groups=8,
        **UNETS[family],
    )


def tiny_vae(channels: int = 4, **more: Any) -> AutoencoderKL:
    return AutoencoderKL(
        block_out_channels=(16, 16, 16, 16),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=channels,
        norm_num_groups=8,
        sample_size=64,
        **more,
    )


def tiny_flux2_vae() -> AutoencoderKLFlux2:
    """With statistics of its batch norm that differ between channels and places."""
    vae = AutoencoderKLFlux2(block_out_channels=(16, 16, 16, 16), layers_per_block=1, norm_num_groups=8, sample_size=64)
    vae.bn.running_mean.uniform_(-0.2, 0.2)
    vae.bn.running_var.uniform_(0.5, 2.0)
    return vae


def tiny_video_vae() -> AutoencoderKLQwenImage:
    """Of Qwen-Image, with its published mean and deviation of each channel."""
    return AutoencoderKLQwenImage(base_dim=8, dim_mult=[1, 1, 1, 1], num_res_blocks=1)


def tiny_rgba_vae() -> AutoencoderKLQwenImage21:
    """Of Qwen-Image 2.1, with its published mean and deviation of each of 64 channels."""
    return AutoencoderKLQwenImage21(base_dim=8, decoder_base_dim=8, dim_mult=[1, 1, 1, 1, 1], num_res_blocks=1)


def random_lora(
    part: torch.nn.Module,
    *,
    rank: int = 4,
    alpha: float = 2.0,
    size: float = 0.3,
    endings: tuple[str, ...] = ENDINGS,
    component: str = "unet",
) -> LoraWeights:
    generator = torch.Generator().manual_seed(7)
    modules = {}
    for name, shape in shapes_of({component: part}).items():
        if not name.endswith(endings):
            continue
        down = torch.randn(rank, *shape[1:], generator=generator) * size
        up = torch.randn(shape[0], rank, *([1] * (len(shape) - 2)), generator=generator) * size
        modules[name] = LoraPair(down, up, alpha)
    return LoraWeights(modules)


def facts(**changes: object) -> TrainingFacts:
    values: dict[str, object] = {
        "base_version": "sd_v1",
        "architecture": "stable-diffusion-v1/lora",
        "name": "cat",
        "base_name": "my-sd15",
        "alpha": 2.0,
        "targets": "attention",
        "resolution": (512, 768),
        "steps": 100,
        "epochs": 10,
        "samples": 20,
        "batch": 2,
        "learning_rate": 1e-4,
        "optimizer": "adamw",
        "schedule": "constant_with_warmup",
        "seed": 42,
        "started": 1_700_000_000.0,
        "finished": 1_700_000_100.0,
        "version": "0.1.0",
        "buckets": {(512, 768): 18, (640, 640): 2},
    }
    return TrainingFacts(**(values | changes))  # type: ignore[arg-type]


def weights_from_peft(
    state: Mapping[str, torch.Tensor], component: str, alpha: float | Mapping[str, float]
) -> LoraWeights:
    """The weights in the state of a component that peft put a LoRA on; `alpha` is one number, or one per module."""
    modules = {}
    for key, down in state.items():
        if match := re.fullmatch(r"(.+)\.lora_A(\.[^.]+)?\.weight", key):
            own = alpha[match[1]] if isinstance(alpha, Mapping) else alpha
            modules[module_name(component, match[1])] = LoraPair(down, state[key.replace(".lora_A", ".lora_B")], own)
    return LoraWeights(modules)
