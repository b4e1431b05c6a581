"""A production run from Python: the same functions that the command calls, in the order a notebook wants them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.config.layers import Layer, Resolved, file_layer, flattened
from lora_trainer.config.presets import AUTO, preset_layers
from lora_trainer.core.errors import Problem
from lora_trainer.core.quiet import quieten_libraries
from lora_trainer.core.terminal import open_missing_streams
from lora_trainer.run.bases.find import on_stderr, silent
from lora_trainer.run.inputs import read_architecture, read_data, read_model
from lora_trainer.run.order import make_order, plain_console, run_folder
from lora_trainer.run.plans.plan import Plan, make_plan
from lora_trainer.run.settings import go_offline, settle
from lora_trainer.run.train import RunResult, train
from lora_trainer.run_folder.progress import Watch, unwatched

if TYPE_CHECKING:
    from rich.console import Console

    from lora_trainer.config.schema import Config
    from lora_trainer.dataset_check import DataReport

Source = str | os.PathLike[str]


@dataclass(frozen=True)
class Setting:
    """One setting of a run: `optimizer.learning_rate`, its value, and which default, preset, file or argument gave it."""

    name: str
    value: Any
    origin: str


class ProductionTrainer:
    """One LoRA: check the data, resolve the settings, train, evaluate, export or refuse.

    Everything is optional: without `model` the built-in base model is used, without `data` the
    built-in dataset. `presets` are names such as `12gb` and `quality`, or `auto`. `settings`
    are `{"lora.rank": 8}` or `{"lora": {"rank": 8}}`. Layers, later wins: defaults, family
    preset, `presets`, `config` (a TOML file), `settings`, the other arguments.

    `progress` is called during the run with a `Progress`; with `quiet` nothing is printed.
    Raises UsageError with everything that is wrong with the settings.
    """

    def __init__(
        self,
        model: Source | None = None,
        data: Source | Sequence[Source] | None = None,
        *,
        presets: str | Sequence[str] = (),
        settings: Mapping[str, Any] | None = None,
        config: Source | None = None,
        output: Source | None = None,
        name: str | None = None,
        progress: Watch = unwatched,
        quiet: bool = False,
    ) -> None:
        open_missing_streams()
        quieten_libraries()
        asked = [presets] if isinstance(presets, str) else list(presets)
        wants_gpu = any(each.strip() == AUTO for part in asked for each in part.split(","))
        problems = list[Problem]()
        layers = [file_layer(f"config {os.fspath(config)}", Path(config))] if config is not None else []
        layers.append(Layer("settings", _nested(settings or {}, problems)))
        layers += [Layer(each, values) for each, values in _named(model, data, output, name).items()]
        gpu_gib = None
        if wants_gpu:
            from lora_trainer.run.choices import gpu_gib_for_auto

            gpu_gib = gpu_gib_for_auto(layers)
        chosen = preset_layers(asked, gpu_gib)
        problems = [*chosen.problems, *problems]
        self._resolved = settle(chosen.layers, layers, problems, say=silent if quiet else on_stderr)
        go_offline(self._resolved.config)
        self._console: Console = plain_console(quiet=quiet)
        self._progress = progress
        for note in (*chosen.notes, *self._resolved.notes):
            self._console.print(note)

    @property
    def resolved(self) -> Resolved:
        return self._resolved

    @property
    def config(self) -> Config:
        return self._resolved.config

    @property
    def folder(self) -> Path:
        """Where the run writes."""
        return run_folder(self.config)

    def explain(self) -> tuple[Setting, ...]:
        """Every setting with where it came from."""
        return tuple(
            Setting(name, value, self._resolved.origin[name]) for name, value in flattened(self.config).items()
        )

    def check(self) -> DataReport:
        """The dataset gate's report, also for data that it refuses. Raises UsageError for unreadable folders."""
        _, facts = read_model(self.config, weights=False)
        return read_data(self.config, facts)[1]

    def plan(self) -> Plan:
        """Memory part by part, steps, disk and least time, without a GPU; `to_json()` is what `plan --json` prints."""
        return make_plan(self._resolved)

    def choices(self) -> tuple[str, ...]:
        """What this machine makes of the settings, each with its reason: precision, micro-batch."""
        from lora_trainer.run.choices import choose, processes_on_their_gpus

        processes = processes_on_their_gpus(self.config)
        family, facts = read_model(self.config)
        architecture = read_architecture(family, facts)
        return choose(self._resolved, family, architecture, processes.device, processes.world).lines

    def produce(self, *, resume: bool = False) -> RunResult:
        """The whole run with both gates.

        Raises DatasetRefused or LoraRefused with the gate's `report`, UsageError, or
        TrainingFailed, which names what was saved.
        """
        return self._run(resume=resume, enforce_gates=True)

    def train(self, *, resume: bool = False) -> RunResult:
        """As `produce`, but scores refuse nothing; data that cannot be trained on still does."""
        return self._run(resume=resume, enforce_gates=False)

    def _run(self, *, resume: bool, enforce_gates: bool) -> RunResult:
        order = make_order(
            self._resolved,
            resume=resume,
            enforce_gates=enforce_gates,
            console=self._console,
            watch=self._progress,
        )
        return train(order)


def _nested(settings: Mapping[str, Any], problems: list[Problem]) -> dict[str, Any]:
    """Sections of settings, from names with a dot or from sections; a setting named twice is a problem."""
    sections: dict[str, Any] = {}
    for name, value in settings.items():
        section, dot, key = name.partition(".")
        values = {key: value} if dot else value
        if not isinstance(values, Mapping):
            sections[name] = values  # refused by name, with its section
            continue
        home = sections.setdefault(section, {})
        for each, inner in values.items():
            if each in home:
                problems.append(
                    Problem("setting_twice", f"settings names {section}.{each} twice.", "Leave one of them.")
                )
            home[each] = os.fspath(inner) if isinstance(inner, os.PathLike) else inner
    return sections


def _named(
    model: Source | None, data: Source | Sequence[Source] | None, output: Source | None, name: str | None
) -> dict[str, dict[str, dict[str, Any]]]:
    """The arguments that are settings with a name of their own."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    if model is not None:
        found["model"] = {"model": {"path": os.fspath(model)}}
    if data is not None:
        sources = [data] if isinstance(data, str | os.PathLike) else data
        found["data"] = {"data": {"sources": [os.fspath(source) for source in sources]}}
    if output is not None:
        found["output"] = {"run": {"output": os.fspath(output)}}
    if name is not None:
        found["name"] = {"run": {"name": name}}
    return found
