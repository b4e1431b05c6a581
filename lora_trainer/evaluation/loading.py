"""A LoRA file put on a fresh copy of its base, as a user's program would do it."""

from __future__ import annotations

import contextlib
import gc
import json
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
from lora_trainer.export.diffusers import adapter_metadata, diffusers_tensors
from lora_trainer.export.keys import EMBEDDING, KOHYA_DOWN
from lora_trainer.export.weights import LoraWeights, check_keys, folded, shapes_of
from lora_trainer.models.family import Family
from lora_trainer.models.folder import named_parts, read_config
from lora_trainer.models.frozen import empty_text_encoder

WORST_SHOWN = 5  # modules that do not fit, of many
COMPLAINTS = ("unexpected keys", "missing keys", "were ignored", "unsuccessful", "not found")


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

    New words in the file, which diffusers does not know, are left out of it: `models/textual_inversion.py` adds them.
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


def put_on(pipeline: Any, family: Family, weights: LoraWeights) -> list[str]:
    """Put a LoRA that is read onto a pipeline, whatever form its file has: every program's files are drawn alike.

    Returns what the libraries complained of.
    """
    with heard() as said:
        pipeline.load_lora_weights(dict(diffusers_tensors(folded(weights, torch.float32))))
    return _complaints(said) + put_rest_on(pipeline, family, weights)


def put_rest_on(pipeline: Any, family: Family, weights: LoraWeights) -> list[str]:
    """Put on T5 what a LoRA changes of it, which diffusers passes over; returns what the libraries complained of.

    The pipeline then switches and scales it with the rest.
    """
    from peft import LoraConfig

    ready, said = folded(replace(weights, embeddings={}), torch.float32), list[str]()
    for component in family.cached_texts:
        prefix = f"{component}."
        own = {name: pair for name, pair in ready.modules.items() if name.startswith(prefix)}
        if not own:
            continue
        told = json.loads(adapter_metadata(replace(ready, modules=own)))
        tensors = diffusers_tensors(replace(ready, modules=own))
        encoder, state = getattr(pipeline, component), {key.removeprefix(prefix): each for key, each in tensors.items()}
        with heard() as complaints:
            encoder.load_adapter(
                adapter_name="default_0",  # as diffusers calls the first of the others
                adapter_state_dict=state,
                peft_config=LoraConfig(**{key.removeprefix(prefix): value for key, value in told.items()}),
            )
        for name, parameter in encoder.named_parameters():
            if (exact := state.get(name.replace(".default_0.", "."))) is not None:
                parameter.data = exact  # the encoder is as it was stored: its precision is not the LoRA's
        pipeline._lora_loadable_modules = [*pipeline._lora_loadable_modules, component]
        said += _complaints(complaints)
    return said


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
    if fused or foreign:
        return put_on(pipeline, family, weights)
    return load_onto(pipeline, lora) or put_rest_on(pipeline, family, weights)


def components_of(pipeline: Any, family: Family) -> dict[str, nn.Module]:
    """The parts of a pipeline that a LoRA may change: the denoiser and the text encoders."""
    names = (family.denoiser_prefix, *family.text_targets)
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
        message = f"The LoRA was trained on another kind of model: {weights.family}; the base is of {family.name}."
        return [Problem(message, "Name a model of its kind with --model.")]
    there = {name.partition(".")[0] for name in shapes}
    others = [
        name for name in weights.modules if name.startswith("text_encoder") and name.partition(".")[0] not in there
    ]
    rest = {name: pair for name, pair in weights.modules.items() if name not in others}
    problems = check_keys(replace(weights, modules=rest), shapes)
    if others:
        message = f"{len(others)} modules of the LoRA are on a text encoder that the base lacks (first: {others[0]})."
        problems.insert(0, Problem(message, "Name a base that has it, or use a LoRA without them."))
    if problems and made_for not in ("", own):
        message = f"The LoRA was trained on another kind of model: {made_for}; the base is {own}."
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
    there = named_parts(base, tuple(name for name in family.text_targets if name in changed))
    texts = {name: empty_text_encoder(base / name) for name in there}
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
