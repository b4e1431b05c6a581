"""Textual inversion: new tokens of CLIP text encoders with learned embeddings (arXiv:2208.01618).

The tokenizer gets the names that diffusers uses: `<zobo>`, `<zobo>_1`, … one token for each embedding. Where a caption
has the first, all are read (`weighting.tokens_of`). The encoder's own table of embeddings stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.models.unet import load_tokenizer

if TYPE_CHECKING:
    from lora_trainer.config.schema.inputs import TextualInversionSection
    from lora_trainer.models.family import TextParts

LearnedTokens = Mapping[str, Mapping[str, Tensor]]  # token -> text encoder's component -> embeddings [vectors, width]

ONLY = ("string_to_param.*",)  # names in files of the embeddings of one encoder, and of two
BOTH = ("clip_l", "clip_g")
ALSO_ONLY = (*ONLY, "clip_l", "emb_params")  # names of other programs
LEARNED = "token_embedding.learned"


class ExtendedEmbedding(nn.Module):
    """A frozen table of embeddings with more rows at its end, which are trained."""

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


def initial_embeddings(parts: TextParts, components: Sequence[str], settings: TextualInversionSection) -> LearnedTokens:
    """The initial embeddings of `textual_inversion.placeholder_tokens`, fp32. Raises UsageError for a start that has no tokens."""
    found: dict[str, dict[str, Tensor]] = {token: {} for token in settings.placeholder_tokens}
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
        for token in settings.placeholder_tokens:
            chosen = list(islice(cycle(range(len(rows))), settings.num_vectors))
            found[token][component] = rows[chosen].clone()
    return found


def check_learned_tokens(folder: Path, components: Sequence[str], settings: TextualInversionSection) -> None:
    """Raise UsageError, all problems at once, for tokens that cannot be learned. Reads tokenizers and no weights."""
    problems: dict[str, Problem] = {}
    for component in components:
        tokenizer = load_tokenizer(folder, component)
        if (
            settings.initializer_token is not None
            and not tokenizer(settings.initializer_token, add_special_tokens=False).input_ids
        ):
            problems["start"] = _no_start(settings)
        for token in settings.placeholder_tokens:
            try:
                _add_tokens(tokenizer, token, settings.num_vectors)
            except UsageError as error:
                problems[token] = error.problems[0]
    if problems:
        raise UsageError(list(problems.values()))


def _no_start(settings: TextualInversionSection) -> Problem:
    message = f"textual_inversion.initializer_token={settings.initializer_token!r} is no word that the model's tokenizer knows."
    return Problem(
        "token_unknown", message, "Set textual_inversion.initializer_token to a word such as `person`, or remove it."
    )


def add_learned_tokens(parts: TextParts, tokens: LearnedTokens) -> dict[str, nn.Parameter]:
    """Add the tokens to tokenizers and encoders, frozen; returns their embeddings [n, D] by parameter's name.

    Raises UsageError for a token that the tokenizer has already, and for embeddings of another model.
    """
    parameters: dict[str, nn.Parameter] = {}
    for component in dict.fromkeys(component for own in tokens.values() for component in own):
        tokenizer, body = parts.tokenizers[component], _body(parts.encoders[component])
        known, first = body.embeddings.token_embedding, len(tokenizer)
        rows = {token: own[component] for token, own in tokens.items()}
        for token, embeddings in rows.items():
            if embeddings.shape[-1] != known.embedding_dim:
                widths = f"{embeddings.shape[-1]} wide; {component} of the model reads {known.embedding_dim}"
                raise UsageError(
                    Problem(
                        "token_embeddings_differ",
                        f"The embeddings of {token!r} are {widths}.",
                        "Name a model of its kind.",
                    )
                )
            _add_tokens(tokenizer, token, len(embeddings))
        learned = torch.cat(list(rows.values())).to(parts.device, known.weight.dtype)
        body.embeddings.token_embedding = table = ExtendedEmbedding(known, first, learned)
        # Old configs say 2: then transformers takes the largest token for the end, and new tokens are larger.
        body.eos_token_id = tokenizer.eos_token_id
        name = next(name for name, each in parts.encoders[component].named_parameters() if each is table.learned)
        parameters[f"{component}.{name}"] = table.learned
    return parameters


def _add_tokens(tokenizer: Any, token: str, vectors: int) -> None:
    names = [token, *(f"{token}_{number}" for number in range(1, vectors))]
    before = len(tokenizer)
    tokenizer.add_tokens(names)
    if len(tokenizer) != before + vectors:
        message = f"{token!r} is already a token of the model, so it cannot be a new one."
        raise UsageError(Problem("token_exists", message, f"Choose another, such as <{token.strip('<>')}>."))


def _body(encoder: Any) -> Any:
    return getattr(encoder, "text_model", encoder)  # transformers 5.6 took it out of one of two classes


def to_embeddings(trained: Mapping[str, Tensor], components: Sequence[str], tokens: Sequence[str]) -> dict[str, Tensor]:
    """The tokens' embeddings among trained weights by name, as `LoraWeights.embeddings` names them: `<zobo>.clip_l`."""
    found: dict[str, Tensor] = {}
    for component, slot in zip(components, slots(components), strict=True):
        for name, rows in trained.items():
            if name.startswith(f"{component}.") and name.endswith(LEARNED):
                parts = rows.detach().chunk(len(tokens))
                found |= {f"{token}.{slot}": part for token, part in zip(tokens, parts, strict=True)}
    return found


def from_embeddings(embeddings: Mapping[str, Tensor], components: Sequence[str]) -> LearnedTokens:
    """The tokens of a file. Raises UsageError for embeddings that are not those of the model's encoders."""
    found: dict[str, dict[str, Tensor]] = {}
    known = {slot: component for component, slot in zip(components, slots(components), strict=True)}
    if len(components) == 1:
        known = dict.fromkeys(ALSO_ONLY, components[0])
    for name, rows in embeddings.items():
        token, _, slot = name.partition(".")
        if slot not in known or rows.ndim not in (1, 2):
            meant = " and ".join(slots(components)) or "none"
            message = f"The file's token {token!r} has embeddings {slot} of shape {list(rows.shape)}; the model reads {meant}."
            raise UsageError(Problem("token_embeddings_differ", message, "Name a model of its kind."))
        found.setdefault(token, {})[known[slot]] = rows.reshape(-1, rows.shape[-1])
    if lacking := [token for token, own in found.items() if len(own) != len(components)]:
        message = (
            f"The file's token {lacking[0]!r} lacks embeddings for some of the model's {len(components)} encoders."
        )
        raise UsageError(Problem("token_embeddings_missing", message, "Name a model of its kind."))
    return found


def slots(components: Sequence[str]) -> tuple[str, ...]:
    """Names in files of the embeddings of each of a family's CLIP encoders."""
    return (ONLY if len(components) == 1 else BOTH)[: len(components)]
