"""LoRA files that a run reads: the weights that it starts from, and the training adapter of a distilled model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from lora_trainer.adapters.adapter_kinds import adapter_kind, denoiser_options, text_options
from lora_trainer.adapters.base import AdapterOptions
from lora_trainer.adapters.target_modules import target_modules
from lora_trainer.config.schema import Config
from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.findings import counted
from lora_trainer.evaluation.loading import in_short, misfits_by_config
from lora_trainer.export.weights import LoraWeights, adaptable_modules, module_name
from lora_trainer.models.base_loras import add_frozen
from lora_trainer.models.family import Family, ModelFacts
from lora_trainer.models.folder import read_config
from lora_trainer.models.lora_names import read_lora
from lora_trainer.training.layer_options import pattern_problems


def check_lora_files(config: Config, family: Family, facts: ModelFacts) -> None:
    """Raise UsageError with all problems of `lora.network_weights`, `model.training_adapter`, `model.loras` and patterns of layers.

    Reads the files and the model's configs, not its weights.
    """
    problems = pattern_problems(config, family, facts)
    for merged, _ in family.loras:
        found = in_short(misfits_by_config(read_lora(Path(merged)), family, facts.path))
        problems += named("model.loras", merged, found)
    if (path := config.model.training_adapter) is not None:
        weights = read_lora(lora_path(path))
        found = in_short(misfits_by_config(weights, family, facts.path))
        others = set(weights.modules) - set(of_component(weights, family.denoiser.component).modules)
        if not found and others:
            message = f"It changes more than the {family.denoiser.component} (first: {min(others)})."
            found = [Problem(message, "Use a LoRA on that alone.")]
        problems += named("model.training_adapter", path, found)
    if (path := config.lora.network_weights) is not None:
        weights = read_lora(lora_path(path))
        found = in_short(misfits_by_config(weights, family, facts.path))
        problems += named("lora.network_weights", path, found or misplaced(weights, config, family, facts))
    if problems:
        raise UsageError(problems)


def lora_path(path: str) -> Path:
    """The file of `lora.network_weights` or `model.training_adapter`."""
    return Path(path).expanduser()


def misplaced(weights: LoraWeights, config: Config, family: Family, facts: ModelFacts) -> list[Problem]:
    """What a run cannot start from: modules that it does not train, and a rank above its own."""
    if adapter_kind(config).start_from is None:
        return [Problem(f"A run with lora.type={config.lora.type} cannot start from a file.", "Set lora.type=lora.")]
    prefix = family.denoiser.component
    with torch.device("meta"):
        denoiser = family.denoiser.make(read_config(facts.path, f"{prefix}/config.json"))
    trained = {f"{prefix}.{name}" for name in target_modules(denoiser, family.denoiser, config.lora.target_modules)}
    problems = []
    if untrained := [name for name in weights.modules if name.startswith(f"{prefix}.") and name not in trained]:
        message = f"{counted(len(untrained), 'module')} of it would not be trained (first: {untrained[0]})."
        problems.append(Problem(message, "Set lora.target_modules to attention+ff, or to patterns that match them."))
    texts = family.text_rates(config.text_encoder.learning_rates)
    for component in sorted({name.partition(".")[0] for name in weights.modules} - {prefix, *texts}):
        message = f"It changes {component}, which this run does not train."
        problems.append(Problem(message, "Set text_encoder.learning_rates, or use a LoRA without it."))
    for setting, rank, components in (
        ("lora.rank", denoiser_options(config).rank, (prefix,)),
        ("text_encoder.lora_rank", text_options(config).rank, tuple(texts)),
    ):
        needed = max(
            (pair.rank for each in components for pair in of_component(weights, each).modules.values()), default=0
        )
        if needed > rank:
            problems.append(
                Problem(f"Its rank is {needed}, and {setting}={rank} is lower.", f"Set {setting}={needed}.")
            )
    return problems


def named(setting: str, path: str, problems: Sequence[Problem]) -> list[Problem]:
    """The problems with the setting and its file before each."""
    return [Problem(f"{setting}={path}: {problem.message}", problem.fix) for problem in problems]


def start_from_file(
    config: Config,
    component: str,
    modules: Sequence[str],
    parameters: Mapping[str, nn.Parameter],
    options: AdapterOptions,
) -> str:
    """Put the values of `lora.network_weights` into a component's new adapter on `modules`, and return a line.

    The first prediction is that of the file's LoRA, its alpha included. `check_lora_files` has checked that it fits.
    """
    path, start = lora_path(str(config.lora.network_weights)), adapter_kind(config).start_from
    assert start is not None
    own = of_component(read_lora(path), component).modules
    names = {module_name(component, module): module for module in modules}
    taken = {names[name]: pair for name, pair in own.items() if name in names}
    start(parameters, taken, options)
    fresh, left = len(names) - len(taken), len(own) - len(taken)
    rest = f"; {fresh} of {len(names)} are new" if fresh else ""
    rest += f"; {left} of its modules reach no prediction here and are left out" if left else ""
    return f"{component}: starts from {path.name}, {counted(len(taken), 'module')}{rest} (lora.network_weights)"


def of_component(weights: LoraWeights, component: str) -> LoraWeights:
    """The part of a LoRA on the denoiser, or on one text encoder."""
    modules = {name: pair for name, pair in weights.modules.items() if name.startswith(f"{component}.")}
    return LoraWeights(modules, weights.metadata, family=weights.family)


def add_training_adapter(
    denoiser: nn.Module, config: Config, family: Family, dtype: torch.dtype, device: torch.device
) -> str:
    """Add a frozen LoRA to the outputs of a denoiser's layers, whatever they are stored in, and return a line.

    It is there while training alone: images and LoRA files are of the model without it. Called before the trained
    adapter is injected, so that each layer's own output has it.
    """
    path = lora_path(str(config.model.training_adapter))
    layers = adaptable_modules({family.denoiser.component: denoiser})
    pairs = of_component(read_lora(path), family.denoiser.component).modules
    for name, pair in pairs.items():
        add_frozen(layers[name], pair, dtype, device)
    return f"training adapter: {path.name} on {counted(len(pairs), 'module')}, not in images nor in the LoRA"
