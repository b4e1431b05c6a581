"""Train text encoders with the denoiser: their adapters, and captions encoded in every step.

Their trained weights are in the denoiser's adapter, under their component's name (`text_encoder.…`), so whatever
is done to the adapter is done to all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lora_trainer.adapters.adapter_kinds import ADAPTERS, adapter_kind, add_adapter, text_options
from lora_trainer.adapters.target_modules import matching_modules
from lora_trainer.lora_format.weights import shapes_of
from lora_trainer.models.family import Caption, Family, ModelFacts, TextParts
from lora_trainer.models.textual_inversion import add_learned_tokens, initial_embeddings
from lora_trainer.training.layer_options import layer_option_notes
from lora_trainer.training.network_weights import start_from_file

if TYPE_CHECKING:
    from lora_trainer.config.schema import Config
    from lora_trainer.evaluation.validation_loss import EncodedSample
    from lora_trainer.optim.optimizers import Rates
    from lora_trainer.training.micro_batch import MicroBatch

Encode = Callable[[Sequence[Caption], Mapping[str, Tensor]], dict[str, Tensor]]


@dataclass(frozen=True)
class TrainedTexts:
    """Text encoders in memory: the trained ones, and frozen ones that read captions with them.

    `encode` turns captions, and the cached text embeddings of frozen encoders (empty where there are none), into
    conditioning with gradients. `parameters` are all trained ones by name, `fixed` their adapters' tensors that are not
    trained, `lrs` the learning rates with the parameters' names;
    `shapes` are the weight shapes of the untouched encoders by module.
    """

    parts: TextParts
    encode: Encode
    parameters: dict[str, nn.Parameter]
    fixed: dict[str, Tensor]
    lrs: Rates
    shapes: Mapping[str, tuple[int, ...]]
    notes: tuple[str, ...]

    def conditioning(self, micro: MicroBatch) -> Mapping[str, Tensor]:
        """Conditioning of a micro-batch's captions, with gradients."""
        return self.encode(micro.captions, micro.cond)


def build_texts(
    config: Config, family: Family, facts: ModelFacts, *, dtype: torch.dtype, device: torch.device, checkpointed: bool
) -> TrainedTexts | None:
    """Load the text encoders and add what is trained of them; None where nothing is.

    `checkpointed`: their layers recompute their activations in the backward pass. Raises UsageError as `text_rates`.
    """
    if not config.trains_text:
        return None
    trained = family.text_rates(config.text_encoder.learning_rates)
    parts = family.text.load(
        facts.path, dtype, device, (*family.text.left_in_cache(trained), *family.text.options.without)
    )
    for encoder in parts.encoders.values():
        drop_nothing(encoder)
    shapes = shapes_of(parts.encoders)

    def encode(captions: Sequence[Caption], known: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: value.to(dtype) for name, value in family.text.encode_captions(parts, captions, known).items()}

    def encode_alone() -> dict[str, Tensor]:
        return family.text.encode(parts, ("",), family.text.options)

    parameters, fixed = dict[str, nn.Parameter](), dict[str, Tensor]()
    lrs, notes = list[tuple[float, Collection[str]]](), list[str]()
    for component, lr in trained.items():
        encoder = parts.encoders[component]
        names = used_modules(encoder, matching_modules(encoder, family.text.targets[component]), encode_alone)
        options = text_options(config, component)
        notes += [f"{component}: {line}" for line in layer_option_notes(encoder, names, options)]
        added = add_adapter(encoder, names, config, options, component)
        fixed |= {f"{component}.{name}": value for name, value in adapter_kind(config).fixed(encoder).items()}
        own = {f"{component}.{name}": parameter for name, parameter in added.items()}
        parameters |= own
        lrs.append((lr, frozenset(own)))  # names alone, so that the weights can be freed
        title = ADAPTERS[config.lora.type].title
        notes.append(f"{component}: {title} rank {options.rank}, {len(names)} modules, lr={lr:g}")
        if config.lora.network_weights is not None:
            notes.append(start_from_file(config, component, names, added, options))
        if checkpointed:
            checkpoint_layers(encoder)
    if config.textual_inversion.placeholder_tokens:
        tokens = add_trainable_tokens(parts, family.text.clips, config, checkpointed=checkpointed)
        parameters |= tokens
        lrs.append((config.textual_inversion.learning_rate, frozenset(tokens)))
        section = config.textual_inversion
        named = f"{', '.join(section.placeholder_tokens)} of {section.num_vectors} embeddings each"
        notes.append(f"learned tokens: {named}, lr={section.learning_rate:g}")
    for encoder in parts.encoders.values():
        encoder.train()
    return TrainedTexts(parts, encode, parameters, fixed, tuple(lrs), shapes, tuple(notes))


def add_trainable_tokens(
    parts: TextParts, components: Sequence[str], config: Config, *, checkpointed: bool
) -> dict[str, nn.Parameter]:
    """Add `textual_inversion.placeholder_tokens` to every CLIP encoder; their embeddings by name, component first."""
    own = add_learned_tokens(parts, initial_embeddings(parts, components, config.textual_inversion))
    for parameter in own.values():
        parameter.requires_grad_(True)
    for component in components:
        if checkpointed:
            checkpoint_layers(parts.encoders[component])
    return own


def used_modules(encoder: nn.Module, names: list[str], encode: Callable[[], Mapping[str, Tensor]]) -> list[str]:
    """The modules whose outputs reach the conditioning: with CLIP skip, the last layers do not.

    Found by a trial: each output is multiplied by its own one, and autograd shows which of them matter.
    """
    ones = {name: torch.ones((), requires_grad=True) for name in names}

    def multiplied(one: Tensor, _: nn.Module, __: Any, output: Tensor) -> Tensor:
        return output * one.to(output.device, output.dtype)

    hooks = [encoder.get_submodule(name).register_forward_hook(partial(multiplied, one)) for name, one in ones.items()]
    try:
        with torch.enable_grad():
            total = sum((value.float().sum() for value in encode().values()), torch.zeros(()))
            found = torch.autograd.grad(total, list(ones.values()), allow_unused=True)
    finally:
        for hook in hooks:
            hook.remove()
    return [name for name, gradient in zip(names, found, strict=True) if gradient is not None]


def drop_nothing(encoder: nn.Module) -> None:
    """Disable an encoder's own dropout, which T5 has by its config.

    Captions are then encoded as while drawing, and a step's numbers depend on its position in the run alone.
    """
    for module in encoder.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0  # type: ignore[assignment]  # of attention, a number of its own


def checkpoint_layers(encoder: Any) -> None:
    """Recompute the activations of an encoder's layers in the backward pass."""
    encoder.gradient_checkpointing_enable({"use_reentrant": False})


@torch.no_grad()
def encode_validation_captions(
    texts: TrainedTexts | None, samples: Sequence[EncodedSample], device: torch.device
) -> list[EncodedSample]:
    """The samples with their captions encoded by the trained text encoders; unchanged where none is trained."""
    if texts is None:
        return list(samples)
    found = []
    for sample in samples:
        known = {name: value[None].to(device) for name, value in sample.cond.items()}
        cond = texts.encode((sample.caption,), known)
        found.append(replace(sample, cond={name: value[0] for name, value in cond.items()}))
    return found
