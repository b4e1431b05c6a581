"""New words of CLIP text encoders, whose embeddings are learned: textual inversion (arXiv:2208.01618).

A word is known to the tokenizer as diffusers knows it: `<zobo>`, `<zobo>_1`, … one token for each embedding, and where
the first stands in a caption all are read (`weighting.words_of`). The encoder's own table of embeddings stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lora_trainer.config.schema.inputs import TextualInversionSection
from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.models.family import TextParts
from lora_trainer.models.unet import load_tokenizer

Words = Mapping[str, Mapping[str, Tensor]]  # word -> text encoder's component -> embeddings [vectors, width]

ONLY = ("string_to_param.*",)  # what the embeddings of one encoder are called in files, and of two
BOTH = ("clip_l", "clip_g")
ALSO_ONLY = (*ONLY, "clip_l", "emb_params")  # what other programs call them
LEARNED = "token_embedding.learned"


class WithWords(nn.Module):
    """A table of embeddings with more rows behind it, which alone are learned."""

    def __init__(self, known: nn.Module, first: int, learned: Tensor) -> None:
        super().__init__()
        self.known = known
        self.first = first
        self.learned = nn.Parameter(learned, requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Tokens [B, L] -> embeddings [B, L, D]."""
        new = ids >= self.first
        known = self.known(ids.masked_fill(new, 0))
        learned = functional.embedding((ids - self.first).clamp(min=0), self.learned)
        return torch.where(new[..., None], learned, known)


def new_words(parts: TextParts, components: Sequence[str], settings: TextualInversionSection) -> Words:
    """The embeddings that `textual_inversion.placeholder_tokens` start from, fp32. Raises UsageError for a start that has no tokens."""
    found: dict[str, dict[str, Tensor]] = {word: {} for word in settings.placeholder_tokens}
    for component in components:
        tokenizer, encoder = parts.tokenizers[component], parts.encoders[component]
        table = _body(encoder).embeddings.token_embedding.weight.detach().float()
        if settings.initializer_token is None:
            rows = table.mean(dim=0, keepdim=True)
        else:
            rows = table[
                tokenizer(settings.initializer_token, add_special_tokens=False, return_tensors="pt").input_ids[0].long()
            ]
        if not len(rows):
            raise UsageError(_no_start(settings))
        for word in settings.placeholder_tokens:
            chosen = list(islice(cycle(range(len(rows))), settings.num_vectors))
            found[word][component] = rows[chosen].clone()
    return found


def refuse_words(folder: Path, components: Sequence[str], settings: TextualInversionSection) -> None:
    """Raise UsageError, all problems at once, for words that cannot be learned. Reads tokenizers and no weights."""
    problems: dict[str, Problem] = {}
    for component in components:
        tokenizer = load_tokenizer(folder, component)
        if (
            settings.initializer_token is not None
            and not tokenizer(settings.initializer_token, add_special_tokens=False).input_ids
        ):
            problems["start"] = _no_start(settings)
        for word in settings.placeholder_tokens:
            try:
                _add_tokens(tokenizer, word, settings.num_vectors)
            except UsageError as error:
                problems[word] = error.problems[0]
    if problems:
        raise UsageError(list(problems.values()))


def _no_start(settings: TextualInversionSection) -> Problem:
    message = f"textual_inversion.initializer_token={settings.initializer_token!r} is no word that the model's tokenizer knows."
    return Problem(message, "Set textual_inversion.initializer_token to a word such as `person`, or remove it.")


def add_words(parts: TextParts, words: Words) -> dict[str, nn.Parameter]:
    """Teach tokenizers and encoders the words, frozen; the embeddings of all words together [n, D], by parameter's name.

    Raises UsageError for a word that the tokenizer has already, and for embeddings of another model.
    """
    parameters: dict[str, nn.Parameter] = {}
    for component in dict.fromkeys(component for own in words.values() for component in own):
        tokenizer, body = parts.tokenizers[component], _body(parts.encoders[component])
        known, first = body.embeddings.token_embedding, len(tokenizer)
        rows = {word: own[component] for word, own in words.items()}
        for word, embeddings in rows.items():
            if embeddings.shape[-1] != known.embedding_dim:
                widths = f"{embeddings.shape[-1]} wide; {component} of the model reads {known.embedding_dim}"
                raise UsageError(Problem(f"The embeddings of {word!r} are {widths}.", "Name a model of its kind."))
            _add_tokens(tokenizer, word, len(embeddings))
        learned = torch.cat(list(rows.values())).to(parts.device, known.weight.dtype)
        body.embeddings.token_embedding = table = WithWords(known, first, learned)
        # Old configs say 2, and then the largest token is taken for the end, which new words are larger than.
        body.eos_token_id = tokenizer.eos_token_id
        name = next(name for name, each in parts.encoders[component].named_parameters() if each is table.learned)
        parameters[f"{component}.{name}"] = table.learned
    return parameters


def _add_tokens(tokenizer: Any, word: str, vectors: int) -> None:
    names = [word, *(f"{word}_{number}" for number in range(1, vectors))]
    before = len(tokenizer)
    tokenizer.add_tokens(names)
    if len(tokenizer) != before + vectors:
        message = f"{word!r} is a word of the model's tokenizer already, and cannot be learned as a new one."
        raise UsageError(Problem(message, f"Choose another, such as <{word.strip('<>')}>."))


def _body(encoder: Any) -> Any:
    return getattr(encoder, "text_model", encoder)  # transformers 5.6 took it out of one of two classes


def to_embeddings(trained: Mapping[str, Tensor], components: Sequence[str], words: Sequence[str]) -> dict[str, Tensor]:
    """Of trained weights by name the words' embeddings, as `LoraWeights.embeddings` names them: `<zobo>.clip_l`."""
    found: dict[str, Tensor] = {}
    for component, slot in zip(components, slots(components), strict=True):
        for name, rows in trained.items():
            if name.startswith(f"{component}.") and name.endswith(LEARNED):
                parts = rows.detach().chunk(len(words))
                found |= {f"{word}.{slot}": part for word, part in zip(words, parts, strict=True)}
    return found


def from_embeddings(embeddings: Mapping[str, Tensor], components: Sequence[str]) -> Words:
    """The words of a file. Raises UsageError for embeddings that are not those of the model's encoders."""
    found: dict[str, dict[str, Tensor]] = {}
    known = {slot: component for component, slot in zip(components, slots(components), strict=True)}
    if len(components) == 1:
        known = dict.fromkeys(ALSO_ONLY, components[0])
    for name, rows in embeddings.items():
        word, _, slot = name.partition(".")
        if slot not in known or rows.ndim not in (1, 2):
            meant = " and ".join(slots(components)) or "none"
            message = (
                f"The file's word {word!r} has embeddings {slot} of shape {list(rows.shape)}; the model reads {meant}."
            )
            raise UsageError(Problem(message, "Name a model of its kind."))
        found.setdefault(word, {})[known[slot]] = rows.reshape(-1, rows.shape[-1])
    if lacking := [word for word, own in found.items() if len(own) != len(components)]:
        message = f"The file's word {lacking[0]!r} lacks embeddings for some of the model's {len(components)} encoders."
        raise UsageError(Problem(message, "Name a model of its kind."))
    return found


def slots(components: Sequence[str]) -> tuple[str, ...]:
    """What files call the embeddings of each of a family's CLIP encoders."""
    return (ONLY if len(components) == 1 else BOTH)[: len(components)]
