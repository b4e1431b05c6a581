"""The jobs of a batch: ROOT's dataset folders, with settings of their own in `lora.toml`, or a list of configs. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.config.layers import Layer, Resolved, file_layer
from lora_trainer.config.paths import changed, path_settings
from lora_trainer.config.toml import EMPTY
from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.data.sources.names import SETTINGS_FILE, is_image
from lora_trainer.run.bases.names import as_hub_part, local_path
from lora_trainer.run.settings import settle

if TYPE_CHECKING:
    from lora_trainer.config.schema.types import PathKind

CONFIG_ENDING = ".toml"
THE_BATCH_DECIDES = (
    ("data", "sources"),
    ("run", "output"),
    ("run", "offline"),
    # A folder of somebody else must not run commands, nor send anything.
    ("run", "copy_to"),
    ("run", "on_finish"),
    ("run", "on_failure"),
    ("run", "command_seconds"),
    ("run", "trackers"),
    ("run", "tracker_project"),
    ("run", "log_artifacts"),
)


@dataclass(frozen=True)
class Shared:
    """What all jobs of a batch have in common: layers of presets, and of --config and the flags."""

    presets: tuple[Layer, ...]
    user: tuple[Layer, ...]
    resume: bool = False

    def to_json(self) -> dict[str, Any]:
        layers = {"presets": self.presets, "user": self.user}
        found = {kind: [[layer.name, dict(layer.values)] for layer in each] for kind, each in layers.items()}
        return {**found, "resume": self.resume}


def shared_from_json(document: Mapping[str, Any]) -> Shared:
    """The value that `Shared.to_json` made."""
    presets, user = (tuple(Layer(*layer) for layer in document[kind]) for kind in ("presets", "user"))
    return Shared(presets, user, document["resume"])


def read_root(root: Path) -> dict[str, Path]:
    """The dataset folders directly under ROOT by the name of their run, in the order of their names.

    Hidden folders are passed over. Raises UsageError, all problems at once, for a ROOT that is
    no folder, has no folders or holds images itself, and for two runs of one name.
    """
    if not root.is_dir():
        what = "is a file" if root.exists() else "does not exist"
        raise UsageError(
            Problem("folder_unusable", f"{root} {what}.", "ROOT is a folder that holds one folder for each LoRA.")
        )
    entries = sorted((entry for entry in root.iterdir() if not entry.name.startswith(".")), key=lambda each: each.name)
    folders = [entry for entry in entries if entry.is_dir()]
    images = [entry for entry in entries if entry.is_file() and is_image(entry.name)]
    problems = []
    if images:
        message = f"{root} holds {len(images)} images itself (first: {images[0].name}) and {len(folders)} folders."
        fix = f'A batch trains one LoRA for each folder. For one LoRA of all of it: lora-trainer train --data "{root}"'
        problems.append(Problem("images_in_root", message, fix))
    elif not folders:
        problems.append(
            Problem("no_dataset_folder", f"{root} holds no folder.", "ROOT holds one folder of images for each LoRA.")
        )
    runs, by_spelling = dict[str, Path](), dict[str, Path]()
    for folder in folders:
        name = _run_name(folder)
        other = by_spelling.setdefault(name.casefold(), folder)  # many disks do not tell Cat from cat
        if other is not folder:
            message = f"{other.name} and {folder.name} would both become the run {name}."
            problems.append(
                Problem("run_name_twice", message, f"Rename one, or name its run in its {SETTINGS_FILE}: [run] name")
            )
        runs[name] = folder.absolute()
    if problems:
        raise UsageError(problems)
    return runs


def read_configs(paths: Sequence[Path]) -> dict[str, Path]:
    """Config files by the name of their run, which is theirs without `.toml`.

    Raises UsageError, all problems at once, for what is no file, and for two runs of one name.
    """
    problems, configs, by_spelling = [], dict[str, Path](), dict[str, Path]()
    for path in paths:
        if not path.is_file():
            what = "is a folder" if path.is_dir() else "does not exist"
            problems.append(
                Problem("configs_unusable", f"--configs: {path} {what}.", "Name TOML files, each as for --config.")
            )
        other = by_spelling.setdefault(path.stem.casefold(), path)
        if other is not path:
            message = f"{other} and {path} would both become the run {path.stem}."
            problems.append(Problem("run_name_twice", message, "Rename one."))
        configs[path.stem] = path.absolute()
    if problems:
        raise UsageError(problems)
    return configs


def _run_name(folder: Path) -> str:
    """As the folder's file says, where it can be read; else the folder's own name."""
    try:
        name = folder_values(folder).get("run", {}).get("name")
    except (UsageError, AttributeError):  # said when the job's turn comes
        return folder.name
    is_name = isinstance(name, str) and name == Path(name).name and name not in ("", EMPTY)
    return str(name) if is_name else folder.name


def job_settings(shared: Shared, name: str, folder: Path) -> Resolved:
    """The settings of one job: of a dataset folder, or of a config file.

    The file in a folder has the last word, over the batch's own flags. A config file is read as with --config, so flags win.

    Raises UsageError with everything that is wrong in the file.
    """
    problems, user = list[Problem](), list(shared.user)
    if folder.suffix == CONFIG_ENDING and not folder.is_dir():
        values = dict(file_layer(f"--config {folder}", folder).values)
        if isinstance(values.get("run"), dict):
            values["run"] = {key: value for key, value in values["run"].items() if key not in ("name", "output")}
        first_flag = sum(layer.name.startswith("--config ") for layer in user)
        user.insert(first_flag, Layer(f"--config {folder}", values))
        return settle(shared.presets, [*user, Layer("batch", {"run": {"name": name}})])
    fix = "Remove it: the folder is the data; --output and --offline are the batch's."
    try:
        if values := folder_values(folder):
            user.append(Layer(SETTINGS_FILE, values))
        for section, key in THE_BATCH_DECIDES:
            if isinstance(values.get(section), dict) and key in values[section]:
                message = f"{section}.{key} (from {SETTINGS_FILE}) cannot be set by a folder of a batch."
                problems.append(Problem("setting_not_per_folder", message, fix))
    except UsageError as error:
        problems.extend(error.problems)
    user.append(Layer("batch", {"data": {"sources": [str(folder)]}, "run": {"name": name}}))
    return settle(shared.presets, user, problems)


def folder_values(folder: Path) -> dict[str, Any]:
    """What a folder's own file sets, with its relative paths made whole; nothing without a file."""
    path = folder / SETTINGS_FILE
    if not path.exists():
        return {}
    values = dict(file_layer(SETTINGS_FILE, path).values)

    def from_folder(kind: PathKind, text: str) -> str:
        inside = folder / local_path(text)
        is_hub_part = kind.has_hub and not inside.exists() and as_hub_part(text) is not None
        return text if text == EMPTY or is_hub_part else str(inside.resolve())

    for name, kind in path_settings().items():
        section, key = name.split(".")
        own = values.get(section)
        if isinstance(own, dict) and key in own and (section, key) not in THE_BATCH_DECIDES:
            values[section] = {**own, key: changed(own[key], kind, from_folder)}
    return values
