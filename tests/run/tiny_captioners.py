"""Folders of tiny captioners with random weights, in the layout of published ones: config, safetensors, tokenizer and image settings."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    BartTokenizer,
    CLIPImageProcessorPil,
    Florence2Config,
    Florence2ForConditionalGeneration,
    Florence2Processor,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen2VLImageProcessorPil,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    SiglipImageProcessorPil,
)

LETTERS = {letter: place for place, letter in enumerate(sorted(ByteLevel.alphabet()))}
# The templates of the published models, as far as one question about one image goes.
QWEN_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}<|im_start|>system\n"
    "You are a helpful assistant.<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n{% else %}"
    "{% for content in message['content'] %}{% if content['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in content %}{{ content['text'] }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
JOY_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    "{% if message['role'] == 'user' %}<|reserved_special_token_69|>{% endif %}{{ message['content'] | trim }}"
    "<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
ENDS = {"bos_token_id": None, "eos_token_id": 257}  # <|im_end|>
TEXT = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def save(folder: Path, model: Any, *readers: Any, template: str = "") -> Path:
    """All of it in one folder. Random weights are large, so that answers depend on what is read."""
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.data.mul_(8)
    for each in (model, *readers):
        each.save_pretrained(folder)
    if template:
        (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}), encoding="utf-8")
    return folder


def qwen_tokenizer() -> Qwen2Tokenizer:
    tokenizer = Qwen2Tokenizer(vocab=LETTERS, merges=[], model_max_length=4096)
    names = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    return tokenizer


def qwen_ids(tokenizer: Any) -> dict[str, int]:
    names = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
    names |= {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}
    return {key: tokenizer.convert_tokens_to_ids(name) for key, name in names.items()}


def qwen25_vl(folder: Path) -> Path:
    torch.manual_seed(0)
    tokenizer = qwen_tokenizer()
    places = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1000000.0}
    text = {**TEXT, "num_key_value_heads": 1, "vocab_size": len(tokenizer), "rope_parameters": places, **ENDS}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 1, "out_hidden_size": 32}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, **qwen_ids(tokenizer))
    images = Qwen2VLImageProcessorPil(size={"shortest_edge": 56 * 56, "longest_edge": 112 * 112})
    return save(folder, Qwen2_5_VLForConditionalGeneration(config), images, tokenizer, template=QWEN_TEMPLATE)


def qwen3_vl(folder: Path) -> Path:
    torch.manual_seed(0)
    tokenizer = qwen_tokenizer()
    places = {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True, "rope_theta": 5000000.0}
    text = {
        **TEXT,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": len(tokenizer),
        "rope_parameters": places,
        **ENDS,
    }
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 1, "out_hidden_size": 32}
    config = Qwen3VLConfig(
        text_config=text, vision_config={**vision, "deepstack_visual_indexes": [0]}, **qwen_ids(tokenizer)
    )
    images = Qwen2VLImageProcessorPil(patch_size=16, size={"shortest_edge": 64 * 64, "longest_edge": 128 * 128})
    return save(folder, Qwen3VLForConditionalGeneration(config), images, tokenizer, template=QWEN_TEMPLATE)


def joycaption(folder: Path) -> Path:
    """LLaVA with Llama and SigLIP, whose template puts the image into each message of the user."""
    torch.manual_seed(0)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=qwen_tokenizer().backend_tokenizer)
    special = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|reserved_special_token_69|>"]
    tokenizer.add_special_tokens(
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "additional_special_tokens": special}
    )
    image_token = special[-1]
    text = {**TEXT, "model_type": "llama", "num_key_value_heads": 1, "vocab_size": len(tokenizer)}
    vision = {**TEXT, "model_type": "siglip_vision_model", "image_size": 32, "patch_size": 16}
    config = LlavaConfig(
        text_config=text,
        vision_config=vision,
        image_token_index=tokenizer.convert_tokens_to_ids(image_token),
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
    )
    images = SiglipImageProcessorPil(size={"height": 32, "width": 32})
    how = {"patch_size": 16, "vision_feature_select_strategy": "full", "image_token": image_token}
    reader = LlavaProcessor(images, tokenizer, chat_template=JOY_TEMPLATE, **how)
    return save(folder, LlavaForConditionalGeneration(config), reader)


def florence2(folder: Path) -> Path:
    torch.manual_seed(0)
    vocabulary = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "<mask>": 4}
    vocabulary |= {letter: place + len(vocabulary) for letter, place in LETTERS.items()}
    image = {"image_token": "<image>"}
    tokenizer = BartTokenizer(vocab=vocabulary, merges=[], model_max_length=1024, extra_special_tokens=image)
    text = {
        "model_type": "bart",
        "vocab_size": len(tokenizer),
        "d_model": 32,
        **dict.fromkeys(("encoder_layers", "decoder_layers"), 1),
        **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2),
        **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 32),
        "max_position_embeddings": 1024,
    }
    vision = {
        "embed_dim": [16, 32],
        "depths": [1, 1],
        "num_heads": [2, 2],
        "num_groups": [2, 2],
        "window_size": 4,
        "patch_size": [7, 3],
        "patch_stride": [4, 2],
        "patch_padding": [3, 1],
        "patch_prenorm": [False, True],
        "projection_dim": 32,
    }
    config = Florence2Config(text_config=text, vision_config=vision, image_token_id=tokenizer.image_token_id)
    images = CLIPImageProcessorPil(
        size={"height": 64, "width": 64}, do_center_crop=False, crop_size={"height": 64, "width": 64}
    )
    images.image_seq_length = 65  # 8 x 8 places and their mean
    reader = Florence2Processor(images, tokenizer)
    model = Florence2ForConditionalGeneration(config)
    # What is written is compared with these: neither the end nor halves of characters.
    silent = [place for token, place in vocabulary.items() if len(token) > 1 or not token.isascii()]
    model.get_input_embeddings().weight.data[silent] = 0.0
    return save(folder, model, reader)


def wd14(folder: Path, biases: Sequence[float], batch: int | str = "batch") -> Path:
    """A network in ONNX: the mean color of a square, times nothing, plus one bias for each label, as probabilities."""
    folder.mkdir()
    labels, side = len(biases), 16

    def tensor(name: str, dims: Sequence[int], values: Sequence[float]) -> bytes:
        data = struct.pack(f"<{len(values)}f", *values)
        return b"".join([*(number(1, size) for size in dims), number(2, 1), field(8, name), field(9, data)])

    def node(kind: str, inputs: Sequence[str], output: str, *attributes: bytes) -> bytes:
        parts = [field(1, each) for each in inputs]
        return b"".join([*parts, field(2, output), field(4, kind), *(field(5, each) for each in attributes)])

    def value(name: str, dims: Sequence[int | str]) -> bytes:
        sizes = [field(1, field(2, size) if isinstance(size, str) else number(1, size)) for size in dims]
        return field(1, name) + field(2, field(1, number(1, 1) + field(2, b"".join(sizes))))

    axes = field(1, "axes") + number(20, 7) + b"".join(number(8, axis) for axis in (1, 2))
    keep = field(1, "keepdims") + number(20, 2) + number(3, 0)
    graph = [
        field(1, node("ReduceMean", ["pixels"], "mean", axes, keep)),
        field(1, node("MatMul", ["mean", "weight"], "product")),
        field(1, node("Add", ["product", "bias"], "logits")),
        field(1, node("Sigmoid", ["logits"], "shares")),
        field(2, "tagger"),
        # Blue is first in BGR: the first label rises with it.
        field(5, tensor("weight", [3, labels], [0.1, *[0.0] * (3 * labels - 1)])),
        field(5, tensor("bias", [labels], biases)),
        field(11, value("pixels", [batch, side, side, 3])),
        field(12, value("shares", [batch, labels])),
    ]
    model = number(1, 8) + field(8, number(2, 13)) + field(7, b"".join(graph))
    (folder / "model.onnx").write_bytes(model)
    return folder


def number(place: int, value: int) -> bytes:
    """A whole number of protobuf's wire format."""
    return varint(place << 3) + varint(value)


def field(place: int, value: bytes | str) -> bytes:
    """Text, bytes or a message of protobuf's wire format."""
    data = value.encode() if isinstance(value, str) else value
    return varint(place << 3 | 2) + varint(len(data)) + data


def varint(value: int) -> bytes:
    parts = []
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])
