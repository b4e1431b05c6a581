"""The settings of a request as layers, held to what a request may set: no commands, no path outside of the allowed roots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from lora_trainer.config.layers import Layer
from lora_trainer.config.paths import path_settings, source_paths
from lora_trainer.config.presets import AUTO, preset_layers
from lora_trainer.config.toml import EMPTY, read_toml, settings_like
from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.data.images.remote import is_url
from lora_trainer.run.bases.names import as_hub_part
from lora_trainer.web.safety import Refusal, allowed

if TYPE_CHECKING:
    from lora_trainer.config.schema.types import PathKind

Text = Annotated[str, Field(min_length=1, max_length=4096)]
PAGE = "page"  # the layer of what a request sets; `from page` in messages
# A page must not run commands; the server knows where runs are.
NOT_HERE = {
    "run.on_finish": "Set it in a config that you train in a terminal.",
    "run.on_failure": "Set it in a config that you train in a terminal.",
    "run.output": "Runs are written where the server was started: lora-trainer ui --output DIR",
    "run.name": "Send it as `name`.",
}


class AskedSettings(BaseModel):
    """What a run is made of: base model, data, presets (the user's own too), and settings by `section.key`."""

    model_config = ConfigDict(extra="forbid")
    model: Text | None = None
    data: list[Text] = Field([], max_length=1000)
    presets: list[Text] = Field([], max_length=16)
    settings: dict[Text, Any] = Field({}, max_length=1000)

    def nested(self, problems: list[Problem]) -> dict[str, dict[str, Any]]:
        """The settings by section. What no request may set is added to `problems`."""
        found: dict[str, dict[str, Any]] = {}
        for name, value in self.settings.items():
            section, dot, key = name.partition(".")
            if name in NOT_HERE:
                problems.append(Problem("setting_not_allowed", f"{name} cannot be set here.", NOT_HERE[name]))
            elif not (dot and section and key):
                problems.append(Problem("unknown_setting", f"{name} is not a setting.", settings_like(name)))
            else:
                found.setdefault(section, {})[key] = EMPTY if value is None else value
        return found


def user_presets(folder: Path) -> dict[str, dict[str, Any]]:
    """The presets that were saved in the page, by name: settings by section."""
    found = {}
    for path in sorted(folder.glob("*.toml")):
        try:
            found[path.stem] = read_toml(path)
        except UsageError:  # a file that somebody put there
            continue
    return found


def layers_of(
    asked: AskedSettings,
    own: Mapping[str, Mapping[str, Any]],
    memory_of_gpu: Callable[[Sequence[Layer]], float | None],
    problems: list[Problem],
) -> tuple[list[Layer], list[Layer], list[str]]:
    """Layers of the program's presets and of the user, as those of the command's flags, and notes. `own` are saved presets,
    and `memory_of_gpu` returns GiB of the GPU that trains by the user's layers."""
    user = [Layer(f"saved preset {name}", own[name]) for name in asked.presets if name in own]
    if values := asked.nested(problems):
        user.append(Layer(PAGE, values))
    if asked.model is not None:
        user.append(Layer("--model", {"model": {"path": asked.model}}))
    if asked.data:
        user.append(Layer("--data", {"data": {"sources": list(asked.data)}}))
    gpu = memory_of_gpu(user) if needs_gpu(asked) else None
    chosen = preset_layers([name for name in asked.presets if name not in own], gpu)
    problems.extend(chosen.problems)
    return list(chosen.layers), user, list(chosen.notes)


def needs_gpu(asked: AskedSettings) -> bool:
    return any(name.strip() == AUTO for each in asked.presets for name in each.split(","))


def refuse_outside(values: Iterable[Mapping[str, Any]], roots: Sequence[Path], problems: list[Problem]) -> None:
    """Add a problem for each path outside of the allowed roots, and each command, in settings by section."""
    for layer in values:
        for kind, text in named_places(layer):
            is_elsewhere = text in ("", EMPTY) or text.startswith(("http://", "https://")) or is_url(text)
            if is_elsewhere or ("\0" not in text and kind.has_hub and as_hub_part(text) is not None):
                continue
            try:
                allowed(text, roots)
            except Refusal as error:
                problems.extend(error.problems)
        run = layer.get("run")
        commands = ("on_finish", "on_failure")
        found = [key for key in commands if isinstance(run, Mapping) and run.get(key) not in (None, EMPTY)]
        problems.extend(
            Problem("setting_not_allowed", f"run.{key} cannot be set here.", NOT_HERE[f"run.{key}"]) for key in found
        )


def named_places(values: Mapping[str, Any]) -> Iterator[tuple[PathKind, str]]:
    """Every file and folder that settings by section name, and how they name it. Words that are no path are left out."""
    named: list[tuple[PathKind, Any]] = []
    for name, kind in path_settings().items():
        if name in NOT_HERE:  # no request sets it: it is the server's own
            continue
        section, _, key = name.partition(".")
        of_section = values.get(section)
        if isinstance(of_section, Mapping):
            named.append((kind, of_section.get(key)))
    data = values.get("data")
    sources = data.get("sources") if isinstance(data, Mapping) else None
    named.append((source_paths()["path"], sources))
    for source in sources if isinstance(sources, list | tuple) else [sources]:
        if isinstance(source, Mapping):
            named += [(kind, source.get(key)) for key, kind in source_paths().items()]
    yield from ((kind, text) for kind, value in named for text in texts_in(value) if text not in kind.words)


def texts_in(value: Any) -> Iterator[str]:
    """Texts of a value: itself, or of a list or the keys of a table."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        yield from (each for each in value if isinstance(each, str))
