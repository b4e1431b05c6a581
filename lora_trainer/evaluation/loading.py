"""A LoRA file put on a fresh copy of its base, as a user's program would do it."""

from __future__ import annotations

import contextlib
import gc
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from lora_trainer.core.errors import Problem
from lora_trainer.core.findings import counted
from lora_trainer.core.tensorfile import METADATA, read_tensor_header
from lora_trainer.export.diffusers import diffusers_tensors
from lora_trainer.export.keys import EMBEDDING, KOHYA_DOWN
from lora_trainer.export.weights import LoraWeights, check_keys, folded, shapes_of
from lora_trainer.models.family import Family
from lora_trainer.models.folder import read_config
from lora_trainer.models.frozen import empty_clip

WORST_SHOWN = 5  # modules that do not fit, of many
COMPLAINTS = ("unexpected keys", "missing keys", "were ignored", "unsuccessful", "not found")
OF_T5 = ".encoder.block."  # which no other text encoder's modules are called


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    """Collects what diffusers and peft say, so that nothing is lost and nothing is printed."""
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    listener = Listener(logging.WARNING)
    loggers = [logging.getLogger(name) for name in ("diffusers", "peft", "transformers")]
    before = [(logger.handlers[:], logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.handlers, logger.propagate = [listener], False
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield said
        said.extend(str(warning.message) for warning in caught)
    finally:
        for logger, (handlers, propagate) in zip(loggers, before, strict=True):
            logger.handlers, logger.propagate = handlers, propagate


def load_onto(pipeline: Any, lora: Path) -> list[str]:
    """Load a LoRA into a pipeline; return what the libraries complained of: ignored or missing keys, or a file refused.

    New words in the file, which diffusers does not know, are left out of it: `models/words.py` adds them.
    """
    if any(key.startswith(EMBEDDING) for key in read_tensor_header(lora)):
        rest = {key: tensor for key, tensor in load_file(lora).items() if not key.startswith(EMBEDDING)}
        return _loaded(pipeline, rest)
    named = {"weight_name": lora.name, "use_safetensors": True, "local_files_only": True}
    return _loaded(pipeline, str(lora.parent.resolve()), **named)


def _loaded(pipeline: Any, lora: Any, **named: Any) -> list[str]:
    with heard() as said:
        try:
            pipeline.load_lora_weights(lora, **named)
        except (ValueError, LookupError, AssertionError) as error:  # what diffusers makes of names it does not know
            return [" ".join(f"{type(error).__name__}: {error}".split())]
    return _complaints(said)


def _complaints(said: Sequence[str]) -> list[str]:
    return [line for line in said if any(complaint in line for complaint in COMPLAINTS)]


def put_on(pipeline: Any, weights: LoraWeights) -> list[str]:
    """Put a LoRA that is read onto a pipeline, whatever form its file has: every program's files are drawn alike.

    Returns what the libraries complained of.
    """
    with heard() as said:
        pipeline.load_lora_weights(dict(diffusers_tensors(folded(weights, torch.float32))))
    return _complaints(said)


def judged(pipeline: Any, family: Family, lora: Path, weights: LoraWeights) -> list[str]:
    """Put a LoRA file onto a pipeline as its people load it; return what the libraries complained of.

    diffusers itself does it where it knows the names. It knows none that begin otherwise than its own and kohya's do, and
    of the original's fused layers none of SD3's, and FLUX.1's in its own width alone: there what was read of the file
    is put on.
    """
    keys = [key for key in read_tensor_header(lora) if key != METADATA]
    fused = family.layout and any(key.endswith(KOHYA_DOWN) for key in keys)
    foreign = not all(
        key.startswith((f"{family.denoiser_prefix}.", "text_encoder", "lora_", EMBEDDING)) for key in keys
    )
    return put_on(pipeline, weights) if fused or foreign else load_onto(pipeline, lora)


def components_of(pipeline: Any, family: Family) -> dict[str, nn.Module]:
    """The parts of a pipeline that a LoRA may change: the denoiser and the text encoders."""
    names = (family.denoiser_prefix, "text_encoder", "text_encoder_2")
    return {name: part for name in names if isinstance(part := getattr(pipeline, name, None), nn.Module)}


def adapted_modules(pipeline: Any, family: Family) -> int:
    """How many modules of the pipeline carry a LoRA."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    parts = components_of(pipeline, family).values()
    return sum(isinstance(module, BaseTunerLayer) for part in parts for module in part.modules())


@contextlib.contextmanager
def without_lora(pipeline: Any) -> Iterator[None]:
    """The untouched base inside the block."""
    pipeline.disable_lora()
    try:
        yield
    finally:
        pipeline.enable_lora()


def misfits(weights: LoraWeights, shapes: Mapping[str, tuple[int, ...]], family: Family, base: Path) -> list[Problem]:
    """What of a LoRA does not fit a base, module by module; before that, what base its header says it is for.

    Of a LoRA that is another family's by its names or its header only that, even where names and shapes fit.
    """
    made_for, own = weights.metadata.get("ss_base_model_version", ""), family.base_names(family.describe(base))[0]
    if weights.family not in (None, family.name):
        kinds = f"{made_for}; {base.name} is {own}" if made_for else f"{weights.family}; {base.name} is {family.name}"
        message = f"The LoRA was trained on another kind of model: {kinds}."
        return [Problem(message, "Name a model of its kind with --model.")]
    unread = tuple(f"{part}." for part in (*family.untrained_texts, *({"text_encoder"} - set(family.text_targets))))
    others = [name for name in weights.modules if name.startswith(unread) or OF_T5 in name]
    rest = {name: pair for name, pair in weights.modules.items() if name not in others}
    problems = check_keys(replace(weights, modules=rest), shapes)
    if others:
        message = f"{len(others)} modules of the LoRA are on T5 or a language model (first: {others[0]})"
        fix = "Use a LoRA without them: diffusers does not load them."
        problems.insert(0, Problem(f"{message}, which pictures here are neither drawn nor judged with.", fix))
    if problems and made_for not in ("", own):
        message = f"The LoRA was trained on another kind of model: {made_for}; {base.name} is {own}."
        problems.insert(0, Problem(message, "Name a model of its kind with --model."))
    return problems


def in_short(problems: Sequence[Problem]) -> list[Problem]:
    """The first of many and how many more; what to do is said once where it is the same."""
    shown = list(problems[:WORST_SHOWN])
    more = len(problems) - len(shown)
    if more:
        shown.append(
            Problem(f"{counted(more, 'more key')} {'does' if more == 1 else 'do'} not fit this base.", shown[-1].fix)
        )
    fixes = [problem.fix for problem in shown]
    return [
        replace(problem, fix="" if problem.fix in fixes[place + 1 :] else problem.fix)
        for place, problem in enumerate(shown)
    ]


def misfits_by_config(weights: LoraWeights, family: Family, base: Path) -> list[Problem]:
    """The same by the base's configs alone: nothing is loaded. Raises UsageError for parts that no library builds."""
    with torch.device("meta"):
        denoiser = family.make_denoiser(read_config(base, f"{family.denoiser_prefix}/config.json"))
    changed = {name.partition(".")[0] for name in weights.modules}
    texts = {name: empty_clip(base / name) for name in family.text_targets if name in changed}
    return misfits(weights, shapes_of({family.denoiser_prefix: denoiser, **texts}), family, base)


def free_memory(device: torch.device) -> None:
    """Give back what nothing refers to any more; pipelines hold themselves in circles."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def fresh_pipeline(family: Family, base: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """The base's pipeline, loaded without chatter."""
    with heard():
        return family.make_pipeline(base, dtype, device)
