"""LoRA files that a run reads: the weights that it starts from, and the training adapter of a distilled model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from lora_trainer.adapters.adapter_kinds import ADAPTERS, adapter_kind, denoiser_options, text_options
from lora_trainer.adapters.target_modules import matching_modules, target_modules
from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.findings import counted
from lora_trainer.evaluation.loading import in_short, misfits_by_config
from lora_trainer.lora_format.layer_updates import LayerUpdate, to_lora
from lora_trainer.lora_format.weights import AdapterWeights, W, adaptable_modules, module_name
from lora_trainer.models.base_loras import add_frozen
from lora_trainer.models.folder import read_config
from lora_trainer.models.frozen import empty_text_encoder
from lora_trainer.models.lora_names import read_adapter, read_lora
from lora_trainer.training.layer_options import pattern_problems

if TYPE_CHECKING:
    from lora_trainer.adapters.base import AdapterOptions
    from lora_trainer.config.schema import Config
    from lora_trainer.models.family import Family, ModelFacts


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
            found = [Problem("weights_not_trained", message, "Use a LoRA on that alone.")]
        problems += named("model.training_adapter", path, found)
    if (path := config.lora.network_weights) is not None:
        start = read_adapter(lora_path(path))
        found = in_short(misfits_by_config(start, family, facts.path))
        problems += named("lora.network_weights", path, found or misplaced(start, config, family, facts))
    if problems:
        raise UsageError(problems)


def lora_path(path: str) -> Path:
    """The file of `lora.network_weights` or `model.training_adapter`."""
    return Path(path).expanduser()


def misplaced(weights: AdapterWeights, config: Config, family: Family, facts: ModelFacts) -> list[Problem]:
    """What a run cannot start from: another kind, modules that it does not train, and a rank above its own.

    The adapters are put on models on the meta device, so that their own shapes decide.
    """
    kind = adapter_kind(config)
    if kind.start_from is None:
        return [
            Problem(
                "kind_starts_from_nothing",
                f"A run with lora.type={config.lora.type} cannot start from a file.",
                "Set lora.type=lora.",
            )
        ]
    if problems := of_another_kind(weights, config.lora.type):
        return problems
    prefix = family.denoiser.component
    with torch.device("meta"):
        denoiser = family.denoiser.make(read_config(facts.path, f"{prefix}/config.json"))
    targets = target_modules(denoiser, family.denoiser, config.lora.target_modules)
    if untrained := [
        name for name in of_component(weights, prefix).modules if name not in {f"{prefix}.{each}" for each in targets}
    ]:
        message = f"{counted(len(untrained), 'module')} of it would not be trained (first: {untrained[0]})."
        problems.append(
            Problem(
                "weights_not_trained",
                message,
                "Set lora.target_modules to attention+ff, or to patterns that match them.",
            )
        )
    texts = family.text_rates(config.text_encoder.learning_rates)
    for component in sorted({name.partition(".")[0] for name in weights.modules} - {prefix, *texts}):
        message = f"It changes {component}, which this run does not train."
        problems.append(
            Problem("weights_not_trained", message, "Set text_encoder.learning_rates, or use a LoRA without it.")
        )
    adapted = [(prefix, denoiser, targets, denoiser_options(config))]
    for component in sorted(set(texts) & {name.partition(".")[0] for name in weights.modules}):
        encoder = empty_text_encoder(facts.path / component)
        modules = matching_modules(encoder, family.text.targets[component])
        adapted.append((component, encoder, modules, text_options(config, component)))
    for component, model, modules, options in adapted:
        with torch.device("meta"):
            parameters = kind.inject(model, modules, options, 0)
        problems += kind.start_from(parameters, by_own_names(weights, component, modules), options)
    return problems


def of_another_kind(weights: AdapterWeights, name: str) -> list[Problem]:
    """The problem of a file that is not of the kind named `name`, or has several."""
    title, of_kinds = ADAPTERS[name].title, dict[str, list[str]]()
    for module, update in weights.modules.items():
        of_kinds.setdefault(update.title, []).append(module)
    if set(of_kinds) <= {title}:
        return []
    as_lora = f"write it as a LoRA, {to_lora(list(weights.modules.values()))}, and set lora.type=lora"
    if len(of_kinds) > 1:
        counts = "; ".join(
            f"{each} in {counted(len(modules), 'layer')}, first {modules[0]}" for each, modules in of_kinds.items()
        )
        message = f"It has several kinds ({counts}), and a run trains one."
        return [Problem("kinds_differ", message, f"{as_lora[0].upper()}{as_lora[1:]}.")]
    own = next((each for each, spec in ADAPTERS.items() if spec.title in of_kinds), None)
    fix = f"Set lora.type={own}, or {as_lora}." if own else f"{as_lora[0].upper()}{as_lora[1:]}."
    return [Problem("kinds_differ", f"It is {min(of_kinds)}, and lora.type={name} trains {title}.", fix)]


def by_own_names(weights: AdapterWeights, component: str, modules: Sequence[str]) -> dict[str, LayerUpdate]:
    """The changes of a file on these modules of a component, by the model's own names of them."""
    own = {module: weights.modules.get(module_name(component, module)) for module in modules}
    return {module: update for module, update in own.items() if update is not None}


def named(setting: str, path: str, problems: Sequence[Problem]) -> list[Problem]:
    """The problems with the setting and its file before each."""
    return [Problem(problem.code, f"{setting}={path}: {problem.message}", problem.fix) for problem in problems]


def start_from_file(
    config: Config,
    component: str,
    modules: Sequence[str],
    parameters: Mapping[str, nn.Parameter],
    options: AdapterOptions,
) -> str:
    """Put the values of `lora.network_weights` into a component's new adapter on `modules`, and return a line.

    The first prediction is that of the file's LoRA, its alpha included. `check_lora_files` has checked that it fits; raises
    UsageError where it does not.
    """
    path, start = lora_path(str(config.lora.network_weights)), adapter_kind(config).start_from
    assert start is not None
    own = of_component(read_adapter(path), component)
    taken = by_own_names(own, component, modules)
    with torch.no_grad():
        problems = start(parameters, taken, options)
    if problems:
        raise UsageError(named("lora.network_weights", path.name, problems))
    fresh, left = len(modules) - len(taken), len(own.modules) - len(taken)
    rest = f"; {fresh} of {len(modules)} are new" if fresh else ""
    rest += f"; {left} of its modules reach no prediction here and are left out" if left else ""
    return f"{component}: starts from {path.name}, {counted(len(taken), 'module')}{rest} (lora.network_weights)"


def of_component(weights: W, component: str) -> W:
    """The part of an adapter on the denoiser, or on one text encoder."""
    modules = {name: pair for name, pair in weights.modules.items() if name.startswith(f"{component}.")}
    return replace(weights, modules=modules, embeddings={})


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
