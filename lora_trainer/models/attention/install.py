"""Make a diffusers model use a chosen attention backend."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.models.attention.kinds import KINDS, Attend


def install_attention(denoiser: nn.Module, name: str) -> None:
    """Make every attention of a denoiser use the backend that was probed.

    `sdpa` is diffusers' own. Raises UsageError where the model has an unknown attention processor.
    """
    attentions: list[Any] = [module for module in denoiser.modules() if hasattr(module, "set_processor")]
    for module in attentions:
        usual = module.processor.usual if isinstance(module.processor, _Processor) else module.processor
        if name == "sdpa":
            module.set_processor(usual)
            remember_signature(type(usual))
            continue
        make = PROCESSORS.get(type(usual).__name__)
        if make is None or not _plain(module):
            problem = f"{type(usual).__name__} of this model is not known: attention {name} cannot take its place."
            raise UsageError(Problem("attention_unknown", problem, "Set hardware.attention_backend=sdpa."))
        module.set_processor(make(usual, KINDS[name]))
        remember_signature(make)


def remember_signature(processor: type[Any]) -> None:
    """Cache a processor's signature, which diffusers inspects in every forward pass: that took a third of the time."""
    call: Any = processor.__call__
    if "__signature__" not in vars(call):
        call.__signature__ = inspect.signature(call)


def _plain(module: Any) -> bool:
    """Whether an attention has none of the parts that only other kinds of models use."""
    absent = ("spatial_norm", "group_norm", "norm_cross", "residual_connection", "fused_projections")
    return (
        not any(getattr(module, part, None) for part in absent) and getattr(module, "rescale_output_factor", 1.0) == 1.0
    )


@dataclass(frozen=True)
class _Processor:
    """`usual` is diffusers' own, whose place this takes."""

    usual: Any
    attend: Attend

    def mixed(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[B, H, L, D] in, [B, L, H * D] out."""
        return self.attend(query, key, value).transpose(1, 2).flatten(2).to(query.dtype)


class CrossProcessor(_Processor):
    """A U-Net's: the image attends to itself, or to the text."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        temb: Tensor | None = None,
    ) -> Tensor:
        _refuse_mask(attention_mask)
        seen = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        return cast("Tensor", _out(attn, self.mixed(*_own(attn, hidden_states, seen))))


class JointProcessor(_Processor):
    """A transformer's, where image and text attend to both, the image first; without text as in a U-Net."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        _refuse_mask(attention_mask)
        parts = _own(attn, hidden_states, hidden_states)
        if encoder_hidden_states is None:
            return cast("Tensor", _out(attn, self.mixed(*parts)))
        text = _added(attn, encoder_hidden_states)
        query, key, value = (torch.cat(pair, dim=2) for pair in zip(parts, text, strict=True))
        images, words = self.mixed(query, key, value).split((hidden_states.shape[1], text[0].shape[2]), dim=1)
        return _out(attn, images), words if attn.context_pre_only else attn.to_add_out(words)


class RotaryProcessor(_Processor):
    """A transformer's with rotary positions (arXiv:2104.09864), the text first; it may be part of `hidden_states`.

    A mask [B, 1, L, L] is one that torch's own choice alone can take.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        if attention_mask is not None:
            usual = self.usual(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)
            return cast("Tensor | tuple[Tensor, Tensor]", usual)
        parts = _own(attn, hidden_states, hidden_states)
        if encoder_hidden_states is not None:
            text = _added(attn, encoder_hidden_states)
            parts = tuple(torch.cat(pair, dim=2) for pair in zip(text, parts, strict=True))
        query, key, value = parts
        query, key = _rotated(query, key, image_rotary_emb)
        mixed = self.mixed(query, key, value)
        if encoder_hidden_states is None:
            return mixed
        words, images = mixed.split((encoder_hidden_states.shape[1], hidden_states.shape[1]), dim=1)
        return _out(attn, images), attn.to_add_out(words.contiguous())


class StreamProcessor(_Processor):
    """A transformer's with rotary positions as complex numbers, where text and image are one sequence.

    Sequences of other lengths in one batch come with a mask [B, L], which torch's own choice alone can take.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        freqs_cis: Tensor | None = None,
    ) -> Tensor:
        if attention_mask is not None:
            return cast("Tensor", self.usual(attn, hidden_states, encoder_hidden_states, attention_mask, freqs_cis))
        query, key, value = _own(attn, hidden_states, hidden_states)
        if freqs_cis is not None:
            query, key = _turned(query, freqs_cis), _turned(key, freqs_cis)
        return cast("Tensor", _out(attn, self.mixed(query, key, value)))


class ParallelProcessor(_Processor):
    """A block's whose attention and feed-forward part share a layer on the way in and one on the way out
    (arXiv:2302.05442), with rotary positions."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        _refuse_mask(attention_mask)
        shared = attn.to_qkv_mlp_proj(hidden_states)
        attending = 3 * attn.inner_dim
        queries, inner = shared.split((attending, shared.shape[-1] - attending), dim=-1)
        query, key, value = queries.chunk(3, dim=-1)
        query, key, value = _heads(attn, query, key, value, attn.norm_q, attn.norm_k)
        query, key = _rotated(query, key, image_rotary_emb)
        mixed = torch.cat([self.mixed(query, key, value), attn.mlp_act_fn(inner)], dim=-1)
        return cast("Tensor", attn.to_out(mixed))


class TwoStreamProcessor(_Processor):
    """A transformer's with two streams of tokens, the text first in their attention, and complex rotary positions of each.

    Captions of other lengths in one batch come with a mask [B, L], which torch's own choice alone can take.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        encoder_hidden_states_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        if encoder_hidden_states is None or encoder_hidden_states_mask is not None or image_rotary_emb is None:
            seen = encoder_hidden_states, encoder_hidden_states_mask, attention_mask, image_rotary_emb
            return cast("tuple[Tensor, Tensor]", self.usual(attn, hidden_states, *seen))
        streams = _added(attn, encoder_hidden_states), _own(attn, hidden_states, hidden_states)
        turns = image_rotary_emb[1], image_rotary_emb[0]
        turned = [
            (_turned(query, own[None]), _turned(key, own[None]), value)
            for (query, key, value), own in zip(streams, turns, strict=True)
        ]
        query, key, value = (torch.cat(pair, dim=2) for pair in zip(*turned, strict=True))
        lengths = encoder_hidden_states.shape[1], hidden_states.shape[1]
        words, images = self.mixed(query, key, value).split(lengths, dim=1)
        return _out(attn, images), attn.to_add_out(words.contiguous())


class BlockCausalProcessor(_Processor):
    """A transformer's where text and image are one sequence: the text attends to itself and to what comes before, the image
    to all. With further images or kept keys it is diffusers' own."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        rotary_emb: Tensor,
        segments: list[tuple[int, int, bool]] | None,
        **named: Any,
    ) -> Tensor:
        if segments is None or len(segments) > 1 or named.get("layer_cache") or named.get("key_valid") is not None:
            usual = self.usual(attn, hidden_states, rotary_emb=rotary_emb, segments=segments, **named)
            return cast("Tensor", usual)
        query, key, value = _own(attn, hidden_states, hidden_states)
        query, key = _turned(query, rotary_emb[None]), _turned(key, rotary_emb[None])
        length = segments[0][1]
        text = [part[:, :, :length] for part in (query, key, value)]
        words = scaled_dot_product_attention(text[0], text[1], text[2], is_causal=True).transpose(1, 2).flatten(2)
        return cast("Tensor", _out(attn, torch.cat([words, self.mixed(query[:, :, length:], key, value)], dim=1)))


class GatedProcessor(_Processor):
    """A transformer's with fewer keys than queries, rotary positions, and a gate after attention, the text first.

    Captions of other lengths in one batch come with a mask, which torch's own choice alone can take.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        if attention_mask is not None:
            return cast("Tensor", self.usual(attn, hidden_states, attention_mask, image_rotary_emb))
        layers = attn.to_q, attn.to_k, attn.to_v
        query, key, value = (
            layer(hidden_states).unflatten(-1, (-1, attn.head_dim)).transpose(1, 2) for layer in layers
        )
        query, key = attn.norm_q(query), attn.norm_k(key)
        query, key = _rotated(query, key, image_rotary_emb)
        shared = attn.num_heads // attn.num_kv_heads
        key, value = (part.repeat_interleave(shared, dim=1) if shared > 1 else part for part in (key, value))
        mixed = self.mixed(query, key, value) * torch.sigmoid(attn.to_gate(hidden_states))
        return cast("Tensor", attn.to_out[0](mixed))


class CosmosProcessor(_Processor):
    """Cosmos's: the image attends to itself with rotary positions, or to the text without."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        _refuse_mask(attention_mask)
        seen = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        query, key, value = _own(attn, hidden_states, seen)
        query, key = _rotated(query, key, image_rotary_emb, -2)
        return cast("Tensor", _out(attn, self.mixed(query, key, value)))


# By the name of diffusers' own, since importing its classes costs seconds.
PROCESSORS: dict[str, type[_Processor]] = {
    "AttnProcessor": CrossProcessor,
    "AttnProcessor2_0": CrossProcessor,
    "JointAttnProcessor2_0": JointProcessor,
    "FluxAttnProcessor": RotaryProcessor,
    "Flux2AttnProcessor": RotaryProcessor,
    "Flux2ParallelSelfAttnProcessor": ParallelProcessor,
    "ZSingleStreamAttnProcessor": StreamProcessor,
    "QwenDoubleStreamAttnProcessor2_0": TwoStreamProcessor,
    "QwenImage21AttnProcessor": BlockCausalProcessor,
    "Krea2AttnProcessor": GatedProcessor,
    "CosmosAttnProcessor2_0": CosmosProcessor,
}


def _own(attn: Any, asking: Tensor, seen: Tensor) -> tuple[Tensor, ...]:
    """[B, L, width] -> query, key and value [B, H, L, D], normed where the model does that."""
    return _heads(attn, attn.to_q(asking), attn.to_k(seen), attn.to_v(seen), attn.norm_q, attn.norm_k)


def _added(attn: Any, words: Tensor) -> tuple[Tensor, ...]:
    """The same of the text, by the layers that a transformer has for it."""
    parts = attn.add_q_proj(words), attn.add_k_proj(words), attn.add_v_proj(words)
    return _heads(attn, *parts, attn.norm_added_q, attn.norm_added_k)


def _heads(attn: Any, query: Tensor, key: Tensor, value: Tensor, norm_q: Any, norm_k: Any) -> tuple[Tensor, ...]:
    size = key.shape[-1] // attn.heads
    query, key, value = (part.unflatten(-1, (-1, size)).transpose(1, 2) for part in (query, key, value))
    return query if norm_q is None else norm_q(query), key if norm_k is None else norm_k(key), value


def _rotated(
    query: Tensor, key: Tensor, positions: tuple[Tensor, Tensor] | None, pairs_along: int = -1
) -> tuple[Tensor, Tensor]:
    """[B, H, L, D] rotated by cosines and sines of its positions, in pairs side by side, or along -2 half of D apart."""
    if positions is None:
        return query, key
    from diffusers.models.embeddings import apply_rotary_emb

    turned = (apply_rotary_emb(part, positions, use_real_unbind_dim=pairs_along) for part in (query, key))
    return cast("tuple[Tensor, Tensor]", tuple(turned))


def _turned(part: Tensor, turns: Tensor) -> Tensor:
    """[B, H, L, D] turned by its positions, complex [B, L, D / 2], in fp32."""
    pairs = torch.view_as_complex(part.float().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turns.unsqueeze(1)).flatten(3).type_as(part)


def _out(attn: Any, mixed: Tensor) -> Any:
    for layer in attn.to_out:  # behind the linear layer some have dropout
        mixed = layer(mixed.contiguous())
    return mixed


def _refuse_mask(mask: Tensor | None) -> None:
    if mask is not None:
        raise NotImplementedError("this attention takes no mask")
