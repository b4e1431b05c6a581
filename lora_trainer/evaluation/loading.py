"""Loads a LoRA file onto a fresh copy of its base model, as a user's program does."""

from __future__ import annotations

import contextlib
import json
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import nn

from lora_trainer.core.errors import Problem
from lora_trainer.core.findings import counted
from lora_trainer.core.tensorfile import METADATA, read_tensor_header
from lora_trainer.evaluation.weight_changes import change_weights, changes_on
from lora_trainer.lora_format.diffusers import adapter_metadata, diffusers_tensors
from lora_trainer.lora_format.keys import EMBEDDING, KOHYA_DOWN
from lora_trainer.lora_format.weights import AdapterWeights, LoraWeights, check_keys, folded, plain_pairs, shapes_of
from lora_trainer.models.folder import named_parts, read_config
from lora_trainer.models.frozen import empty_text_encoder
from lora_trainer.models.lora_names import families_of

if TYPE_CHECKING:
    from lora_trainer.models.family import Family

WORST_SHOWN = 5  # modules that do not fit, of many
COMPLAINTS = ("unexpected keys", "missing keys", "were ignored", "unsuccessful", "not found")


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    """Collect the warnings of diffusers and peft instead of printing them."""
    messages: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    listener = Listener(logging.WARNING)
    loggers = [logging.getLogger(name) for name in ("diffusers", "peft", "transformers")]
    before = [(logger.handlers[:], logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.handlers, logger.propagate = [listener], False
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield messages
        messages.extend(str(warning.message) for warning in caught)
    finally:
        for logger, (handlers, propagate) in zip(loggers, before, strict=True):
            logger.handlers, logger.propagate = handlers, propagate


def load_onto(pipeline: Any, lora: Path) -> list[str]:
    """Load a LoRA into a pipeline; return the libraries' complaints: ignored or missing keys, or a refused file.

    Learned tokens in the file, which diffusers does not know, are skipped: `models/textual_inversion.py` adds them.
    """
    if any(key.startswith(EMBEDDING) for key in read_tensor_header(lora)):
        rest = {key: tensor for key, tensor in load_file(lora).items() if not key.startswith(EMBEDDING)}
        return _loaded(pipeline, rest)
    named = {"weight_name": lora.name, "use_safetensors": True, "local_files_only": True}
    return _loaded(pipeline, str(lora.parent.resolve()), **named)


def _loaded(pipeline: Any, lora: Any, **named: Any) -> list[str]:
    with heard() as messages:
        try:
            pipeline.load_lora_weights(lora, **named)
        except (ValueError, LookupError, AssertionError) as error:  # diffusers raises these for unknown names
            return [" ".join(f"{type(error).__name__}: {error}".split())]
    return _complaints(messages)


def _complaints(messages: Sequence[str]) -> list[str]:
    return [line for line in messages if any(complaint in line for complaint in COMPLAINTS)]


def put_on(pipeline: Any, family: Family, weights: AdapterWeights) -> list[str]:
    """Put a LoRA on a pipeline whatever the format of its file, so that files of every program are sampled alike.

    Returns the libraries' complaints.
    """
    if (pairs := plain_pairs(weights)) is None:
        change_weights(pipeline, components_of(pipeline, family), weights)
        return []
    with heard() as messages:
        pipeline.load_lora_weights(dict(diffusers_tensors(folded(pairs, torch.float32))))
    return _complaints(messages) + put_rest_on(pipeline, family, pairs)


def put_rest_on(pipeline: Any, family: Family, weights: LoraWeights) -> list[str]:
    """Put the T5 part of a LoRA, which diffusers ignores, on a pipeline; returns the libraries' complaints.

    The pipeline then switches and scales it with the rest.
    """
    from peft import LoraConfig

    ready, found = folded(replace(weights, embeddings={}), torch.float32), list[str]()
    for component in family.text.cached:
        prefix = f"{component}."
        own = {name: pair for name, pair in ready.modules.items() if name.startswith(prefix)}
        if not own:
            continue
        settings = json.loads(adapter_metadata(replace(ready, modules=own)))
        tensors = diffusers_tensors(replace(ready, modules=own))
        encoder, state = getattr(pipeline, component), {key.removeprefix(prefix): each for key, each in tensors.items()}
        with heard() as complaints:
            encoder.load_adapter(
                adapter_name="default_0",  # diffusers' name of the first adapter
                adapter_state_dict=state,
                peft_config=LoraConfig(**{key.removeprefix(prefix): value for key, value in settings.items()}),
            )
        for name, parameter in encoder.named_parameters():
            if (exact := state.get(name.replace(".default_0.", "."))) is not None:
                parameter.data = exact  # the encoder keeps its stored precision, which is not the LoRA's
        pipeline._lora_loadable_modules = [*pipeline._lora_loadable_modules, component]
        found += _complaints(complaints)
    return found


def judged(pipeline: Any, family: Family, lora: Path, weights: AdapterWeights) -> list[str]:
    """Put a LoRA file on a pipeline as its users load it; return the libraries' complaints.

    diffusers loads files with its own and kohya's names. It does not load SD3's fused layers of the original model, and
    FLUX.1's only in the published width: for those and other names, the weights read from the file are put on.
    """
    keys = [key for key in read_tensor_header(lora) if key != METADATA]
    fused = family.lora_files.layout and any(key.endswith(KOHYA_DOWN) for key in keys)
    foreign = not all(
        key.startswith((f"{family.denoiser.component}.", "text_encoder", "lora_", EMBEDDING)) for key in keys
    )
    pairs = plain_pairs(weights)
    if fused or foreign or pairs is None:
        return put_on(pipeline, family, weights)
    return load_onto(pipeline, lora) or put_rest_on(pipeline, family, pairs)


def components_of(pipeline: Any, family: Family) -> dict[str, nn.Module]:
    """The parts of a pipeline that a LoRA may change: the denoiser and the text encoders."""
    names = (family.denoiser.component, *family.text.targets)
    return {name: part for name in names if isinstance(part := getattr(pipeline, name, None), nn.Module)}


def adapted_modules(pipeline: Any, family: Family) -> int:
    """How many modules of the pipeline carry a LoRA."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    if (changes := changes_on(pipeline)) is not None:
        return len(changes.updates)
    parts = components_of(pipeline, family).values()
    return sum(isinstance(module, BaseTunerLayer) for part in parts for module in part.modules())


@contextlib.contextmanager
def without_lora(pipeline: Any) -> Iterator[None]:
    """The base model without the LoRA inside the block."""
    if (changes := changes_on(pipeline)) is not None:
        before, changes.strength = changes.strength, 0.0
        try:
            yield
        finally:
            changes.strength = before
        return
    pipeline.disable_lora()
    try:
        yield
    finally:
        pipeline.enable_lora()


@contextlib.contextmanager
def at_strength(pipeline: Any, strength: float | None) -> Iterator[None]:
    """The LoRA at a strength inside the block; None is the base model without it."""
    if strength is None:
        with without_lora(pipeline):
            yield
        return
    if (changes := changes_on(pipeline)) is not None:
        changes.strength = strength
        yield
        return
    names = sorted({name for loaded in pipeline.get_list_adapters().values() for name in loaded})
    pipeline.set_adapters(names, [strength] * len(names))
    yield


def misfits(
    weights: AdapterWeights, shapes: Mapping[str, tuple[int, ...]], family: Family, base: Path
) -> list[Problem]:
    """The modules of a LoRA that do not fit a base model; before them, the base model that its header names.

    For a LoRA of another family, by its names or its header, only that problem, even where names and shapes fit.
    """
    trained_on, own = (
        weights.metadata.get("ss_base_model_version", ""),
        family.lora_files.base_names(family.describe(base))[0],
    )
    unnamed = family.lora_files.like if not trained_on else family.name
    found = families_of(weights)
    if found and not {family.name, unnamed} & {*found}:
        message = (
            f"The LoRA was trained on another model family: {' or '.join(found)}; the base model is {family.name}."
        )
        return [Problem("lora_of_other_family", message, "Set --model to a model of its family.")]
    there = {name.partition(".")[0] for name in shapes}
    others = [
        name for name in weights.modules if name.startswith("text_encoder") and name.partition(".")[0] not in there
    ]
    rest = {name: pair for name, pair in weights.modules.items() if name not in others}
    problems = check_keys(replace(weights, modules=rest), shapes)
    if others:
        lacking = f"that the base model lacks (first: {others[0]})"
        message = f"{len(others)} modules of the LoRA are on a text encoder {lacking}."
        problems.insert(
            0, Problem("lora_of_other_encoders", message, "Use a base model that has it, or a LoRA without them.")
        )
    if problems and trained_on not in ("", own):
        message = f"The LoRA was trained on another model family: {trained_on}; the base model is {own}."
        problems.insert(0, Problem("lora_of_other_family", message, "Set --model to a model of its family."))
    return problems


def in_short(problems: Sequence[Problem]) -> list[Problem]:
    """The first problems and how many more; a fix that several share is kept once."""
    shown = list(problems[:WORST_SHOWN])
    more = len(problems) - len(shown)
    if more:
        shown.append(
            Problem(
                "lora_keys_unknown",
                f"{counted(more, 'more key')} {'does' if more == 1 else 'do'} not fit.",
                shown[-1].fix,
            )
        )
    fixes = [problem.fix for problem in shown]
    return [
        replace(problem, fix="" if problem.fix in fixes[place + 1 :] else problem.fix)
        for place, problem in enumerate(shown)
    ]


def misfits_by_config(weights: AdapterWeights, family: Family, base: Path) -> list[Problem]:
    """The same by the base model's configs, without loading it. Raises UsageError for parts that no library builds."""
    with torch.device("meta"):
        denoiser = family.denoiser.make(read_config(base, f"{family.denoiser.component}/config.json"))
    changed = {name.partition(".")[0] for name in weights.modules}
    there = named_parts(base, tuple(name for name in family.text.targets if name in changed))
    texts = {name: empty_text_encoder(base / name) for name in there}
    return misfits(weights, shapes_of({family.denoiser.component: denoiser, **texts}), family, base)


def fresh_pipeline(family: Family, base: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """The base model's pipeline, loaded without its libraries' output."""
    with heard():
        return family.pipeline.make(base, dtype, device)
