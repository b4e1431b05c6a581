"""The arguments shared by all runs, and the config resolved from them."""

from __future__ import annotations

import argparse
import math
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from lora_trainer.config.common_names import COMMON_NAMES
from lora_trainer.config.layers import Layer, Resolved, file_layer
from lora_trainer.config.presets import AUTO, preset_layers, selectable
from lora_trainer.config.tables import names_for
from lora_trainer.config.toml import homes_of, parse_assignment, parse_value, section_types, setting_names, shown
from lora_trainer.core.errors import Problem, UsageError, nearest
from lora_trainer.core.findings import folded, printable_lines
from lora_trainer.core.launch import is_main_process
from lora_trainer.run.reading import model_of_run
from lora_trainer.run.settings import go_offline, settle
from lora_trainer.run_folder.record import RECORD

# Flag, the setting that it sets, the name of its value, help.
SETTING_FLAGS = (
    (
        "--model",
        "model.path",
        "MODEL",
        "base model: diffusers folder, .safetensors checkpoint or hub id (default: the built-in one)",
    ),
    ("--output", "run.output", "DIR", "folder of runs (default: runs)"),
    ("--name", "run.name", "NAME", "name of the run and its files (default: derived from the dataset)"),
    ("--seed", "train.seed", "N", "seed of the random numbers (default: 42)"),
    (
        "--max-steps",
        "train.max_steps",
        "N",
        "optimizer steps (default: by train.total_repeats, at most train.step_ceiling)",
    ),
    ("--copy-to", "run.copy_to", "PROGRAM", "copy the finished LoRA to comfyui, forge, or a folder"),
    ("--max-hours", "train.max_hours", "H", "stop after H hours, with everything saved"),
)
_TEXT_SETTINGS = ("model.path", "run.output", "run.name")

SAMPLE_FLAGS = {  # what people call those of `sample`
    **dict.fromkeys(("steps", "num_steps", "sample_steps"), "--num-inference-steps"),
    **dict.fromkeys(("cfg", "cfg_scale", "guidance", "scale"), "--guidance-scale"),
    **dict.fromkeys(("negative", "neg", "n_prompt"), "--negative-prompt"),
    **dict.fromkeys(("num_images", "images_per_prompt", "n"), "--num-images-per-prompt"),
    **dict.fromkeys(("weight", "multiplier", "lora_weight", "lora_scale"), "--strength"),
    **dict.fromkeys(("width", "height", "resolution"), "--size"),
    **dict.fromkeys(("base_model", "ckpt", "checkpoint"), "--model"),
}

# The factors of a step's samples in other trainers.
BATCH_FACTORS = ("train_batch_size", "per_device_train_batch_size", "batch_size", "gradient_accumulation_steps")
MANY_FLAGS = 3  # unknown ones are likely those of another trainer

PROFILES: dict[str, dict[str, Any]] = {  # of --profile
    "short": {"enabled": True},
    "long": {"enabled": True, "wait": 10, "warmup": 10, "active": 20, "details": True},
}

EXAMPLES = """examples:
  lora-trainer train --preset 12gb --data ./images --name cat
  lora-trainer train --preset 12gb,quality --model ./my-sd15 --data ./images
  lora-trainer train --config runs/cat/config.toml --resume
  lora-trainer train --data ./images --set lora.rank=8 --explain

Settings come in layers, later wins: defaults, family preset, presets,
accelerate, --config, flags.
"""


NO_NUMBER = re.compile(r"argument (?P<flag>\S+): invalid (?P<kind>int|float) value: '(?P<value>.*)'")  # of argparse


class Parser(argparse.ArgumentParser):
    """argparse that raises UsageError, so that mistakes are shown like all others."""

    def error(self, message: str) -> NoReturn:
        usage = " ".join(self.prog.split()[1:])
        if number := NO_NUMBER.fullmatch(message):
            message = f"{number['flag']} {number['value']} is not a {'whole ' * (number['kind'] == 'int')}number"
        raise UsageError(
            Problem("usage", message[0].upper() + message[1:] + ".", f"See: lora-trainer {usage} --help".strip())
        )


def add_offline_argument(parser: argparse._ActionsContainer) -> None:
    """For every command that names a model."""
    parser.add_argument("--offline", action="store_true", help="make no network request")


def add_settings_arguments(parser: argparse.ArgumentParser) -> None:
    """--preset, --config, --set: what a command needs to build a config."""
    group = parser.add_argument_group("settings")
    group.add_argument(
        "--preset",
        action="append",
        default=[],
        metavar="NAME",
        help=f"repeatable or with commas: {', '.join(selectable())}, or {AUTO} (the VRAM preset for this GPU)",
    )
    group.add_argument(
        "--config", metavar="FILE", help="TOML file of settings, such as a run's config.toml, or what `import` writes"
    )
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="any setting of docs/config.md, such as lora.rank=16 (repeatable)",
    )


def add_run_arguments(parser: argparse.ArgumentParser, hidden: Sequence[str] = (), without: Sequence[str] = ()) -> None:
    """The flags shared by train, produce, plan, cache and batch. `hidden` ones do nothing here and are not in the help, so
    that the command line of a training can be planned and cached; those of `without` are unknown to the command."""

    def unless_hidden(flag: str, text: str) -> str:
        return argparse.SUPPRESS if flag in hidden else text

    group = parser.add_argument_group("the run")
    for flag, setting, metavar, text in SETTING_FLAGS:
        if flag not in without:
            group.add_argument(flag, dest=setting, metavar=metavar, help=unless_hidden(flag, text))
    group.add_argument(
        "--data",
        action="append",
        dest="data.sources",
        metavar="PATH",
        help=unless_hidden(
            "--data",
            "images with captions (repeatable): a folder, an image, .tar, .parquet, a table .jsonl .json .csv .tsv, "
            "or a kohya dataset .toml (default: the built-in dataset)",
        ),
    )
    add_offline_argument(group)
    add_settings_arguments(parser)
    other = parser.add_argument_group("other")
    for flag, text in (
        ("--resume", "continue from the newest valid checkpoint of the run"),
        ("--dry-run", "show samples, buckets, steps and captions, and train nothing"),
    ):
        if flag not in without:
            other.add_argument(flag, action="store_true", help=unless_hidden(flag, text))
    if "--profile" not in without:
        text = "record where the time of some steps goes, for `lora-trainer profile RUN`; `long` has more steps, memory and stacks"
        other.add_argument(
            "--profile",
            nargs="?",
            const="short",
            choices=tuple(PROFILES),
            metavar="short|long",
            help=unless_hidden("--profile", text),
        )
    other.add_argument(
        "--explain", action="store_true", help="show each setting and where it came from, and train nothing"
    )


def add_debug_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")


def unknown_arguments(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> list[Problem]:
    """A problem for each argument that the parser does not know; an unknown flag's value is not another one."""
    flags = [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]
    words = _with_values(unknown)
    batch = _batch_of_other_trainers(words)
    problems: list[Problem] = []
    for word, value in words:
        if not _is_flag(word):
            problems.append(Problem("unexpected_argument", f"Unexpected argument {word}.", _flag_of(word, flags)))
            continue
        fix = _suggestion(word, value, flags)
        if batch and _bare(word) in BATCH_FACTORS:
            fix = f"Use --set train.effective_batch_size={batch}: the samples of a step are one number here."
        problems.append(Problem("unknown_flag", f"Unknown flag {word}.", fix))
    if len(problems) > MANY_FLAGS and "--set" in flags:
        hint = f"{problems[-1].fix} `lora-trainer import` converts a whole config or script of another trainer."
        problems[-1] = Problem(problems[-1].code, problems[-1].message, hint)
    return problems


def _with_values(arguments: Sequence[str]) -> list[tuple[str, str]]:
    """Each argument with its value: of `--rank=8` and of `--rank 8` it is `8`, of others it is empty."""
    words: list[tuple[str, str]] = []
    following = iter([*arguments[1:], ""])
    is_value = False
    for word in arguments:
        after = next(following)
        if is_value:
            is_value = False
        elif not _is_flag(word):
            words.append((word, ""))
        elif "=" in word:
            flag, _, value = word.partition("=")
            words.append((flag, value))
        else:
            is_value = bool(after) and not _is_flag(after)
            words.append((word, after if is_value else ""))
    return words


def _batch_of_other_trainers(words: Sequence[tuple[str, str]]) -> int:
    """The samples of a step that two flags of another trainer mean together; 0 where not both are given as numbers."""
    numbers = [value for word, value in words if _is_flag(word) and _bare(word) in BATCH_FACTORS]
    if len(numbers) < 2 or not all(number.isdecimal() for number in numbers):
        return 0
    return math.prod(int(number) for number in numbers)


def _bare(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_").lower()


def _is_flag(word: str) -> bool:
    return word.startswith("--") or (word.startswith("-") and not word[1:2].isdigit() and word[1:2] not in ("", "."))


def _flag_of(word: str, flags: Sequence[str]) -> str:
    """The flag that a path or setting without one is likely to miss."""
    path, quoted = Path(word), shlex.quote(word)
    if "--set" in flags and parse_assignment(word).__class__ is tuple:
        return f"Use --set {quoted}."
    if "--data" not in flags:
        return "A path with spaces needs quotes."
    if path.suffix in (".safetensors", ".gguf", ".ckpt") or (path / "model_index.json").is_file():
        return f"Use --model {quoted}."
    if path.is_dir() or path.suffix in (".tar", ".parquet", ".json", ".jsonl", ".csv", ".tsv"):
        return f"Use --data {quoted}."
    if path.suffix == ".toml":
        return f"Use --config {quoted}, or --data for a dataset of kohya's scripts."
    return "Images are named with --data, a model with --model. A path with spaces needs quotes."


def _suggestion(flag: str, value: str, flags: Sequence[str]) -> str:
    """The flag or setting that other trainers, or people, call so (`--rank 8` is `--set lora.rank=8`), or the near flags."""
    word = _bare(flag)
    if word == "data" and "--data" not in flags:
        return "Name the images without a flag."
    if (own := SAMPLE_FLAGS.get(word)) in flags and "--strength" in flags:
        return f"Use {own} {value if isinstance(parse_value(value), int | float) else 'VALUE'}."
    named, removed = _of_other_trainers(word) if "--set" in flags else (None, "")
    settings = [name for name in setting_names() if "--set" in flags and name.partition(".")[2] == word]
    if removed and not settings:
        return removed
    settings = settings if named is None else [named]
    if settings and f"--{word.replace('_', '-')}" not in flags:
        return f"Use {' or '.join(_assigned(name, value, flags) for name in settings)}."
    return nearest(flag, flags)


def _of_other_trainers(word: str) -> tuple[str | None, str]:
    """Our setting or flag for another trainer's word (`network_dim`, `train.lr`), or why it is not needed; else (None, "")."""
    if named := COMMON_NAMES.get(word.replace(".", "_")):
        return named, ""
    from lora_trainer.importers.other_names import rules

    for key in dict.fromkeys((word, word.replace(".", "_"))):
        for known in rules():
            if rule := known.get(key):
                # More than a path: regularization images, masks, control images.
                if rule.ours and rule.ours[0] == "data.sources":
                    return None, "It describes data: write it as a source of a config (docs/data.md)."
                return (rule.ours[0], "") if rule.ours else (None, f"It has no use here ({rule.why}): remove it.")
    section, dot, key = word.partition(".")
    own = dot and section in section_types() and section not in ("train", "lora", "model")
    inside = (rule.ours[0] for known in rules() if (rule := known.get(key)) and rule.ours)
    named = COMMON_NAMES.get(key) or next(inside, None)
    return (named, "") if named and (not own or named.startswith(f"{section}.")) else (None, "")


def _named_by_others(word: str) -> str:
    """How to write a setting that other trainers, or people, call so; empty where nobody does."""
    named, removed = _of_other_trainers(word.replace("-", "_").lower())
    return removed or (f"Use {named}." if named in setting_names() else "")


def _misnamed(text: str) -> Problem | None:
    """The answer to `--set` of a setting as another trainer calls it; None for ours, and for what none knows."""
    name, equals, value = (part.strip() for part in text.partition("="))
    word = value.lower().replace("-", "_")
    if name == "lora.type" and word not in names_for(name):
        from lora_trainer.importers.network_kinds import KINDS
        from lora_trainer.importers.words import ALL_WITH_CONVOLUTIONS

        if word in KINDS:
            kind, why = KINDS[word]
            layers = f", and --set 'lora.target_modules={shown(ALL_WITH_CONVOLUTIONS)}' for convolutions"
            fix = f"Use --set lora.type={kind}{layers if word == 'locon' else ''}{why and f': {why}'}."
            return Problem("unknown_adapter_kind", f"--set {text}: {value} is not a kind of adapter here.", fix)
    other = name.replace("-", "_").lower()
    if not equals or name in setting_names() or (homes_of(name) and other not in COMMON_NAMES):
        return None
    named, fix = _of_other_trainers(other)
    if named is not None and (named in setting_names() or named.startswith("--")):
        fix = f"Use {_assigned(named, value, ())}."
    return Problem("unknown_setting", f"--set {text}: {name} is not a setting.", fix) if fix else None


def _assigned(setting: str, value: str, flags: Sequence[str]) -> str:
    """How to set it; with the value where it means the same in every trainer: numbers and paths."""
    if setting.startswith("--"):
        return setting
    own = {name: flag for flag, name, _, _ in SETTING_FLAGS} | {"data.sources": "--data"}
    if own.get(setting) in flags:
        return f"{own[setting]} {shlex.quote(value) if value else 'VALUE'}"
    is_number = bool(value) and isinstance(parse_value(value), int | float)
    return f"--set {setting}={value if is_number else 'VALUE'}"


def resolved_from(
    arguments: argparse.Namespace,
    unknown: Sequence[Problem] = (),
    *,
    builtin_if_none: bool = True,
    extra: Sequence[Layer] = (),
    lora: Path | None = None,
) -> Resolved:
    """Family preset, presets, --config and flags as one config; notes are printed to stderr.

    `extra` are a command's own flags. Without a model, that of the run with the file `lora` is used, else the built-in
    base model, unless `builtin_if_none` is false.

    Raises UsageError with all problems, `unknown` first.
    """
    problems = list(unknown)
    presets, user = layers_from(arguments, problems)
    below = [] if lora is None else model_of_run(lora, user)
    return settled(presets, [*below, *user, *extra], problems, builtin_if_none=builtin_if_none)


def settled(
    presets: Sequence[Layer], user: Sequence[Layer], problems: Sequence[Problem], *, builtin_if_none: bool = True
) -> Resolved:
    """One config of all layers. With `run.offline` no library makes network requests from here on. Raises UsageError."""
    resolved = settle(presets, user, problems, builtin_if_none=builtin_if_none)
    for note in resolved.notes:
        say(note)
    go_offline(resolved.config)
    return resolved


def explained(arguments: argparse.Namespace, resolved: Resolved) -> bool:
    """Show the settings for `--explain`; true if the command is then done."""
    if arguments.explain and is_main_process():
        from lora_trainer.cli.presets import explain

        explain(resolved, as_json=bool(vars(arguments).get("json")))
    return bool(arguments.explain and not vars(arguments).get("dry_run"))


def layers_from(
    arguments: argparse.Namespace, problems: list[Problem], *, presets_if_none: Sequence[str] = ()
) -> tuple[list[Layer], list[Layer]]:
    """Layers of the selected presets, and of --config and the flags; mistakes are added to `problems`."""
    requested = arguments.preset or presets_if_none
    of_user = list[Problem]()
    flags = _flag_layers(arguments, of_user)
    file = _file_layer(arguments.config, of_user)
    chosen = preset_layers(requested, gpu_if_auto(requested, [*file, *flags]))
    problems += [*chosen.problems, *of_user]
    for note in chosen.notes:
        say(note)
    moved = _moved_run(arguments.config, file, flags) if vars(arguments).get("resume") else []
    return list(chosen.layers), [*file, *moved, *flags]


def _moved_run(path: str | None, file: Sequence[Layer], flags: Sequence[Layer]) -> list[Layer]:
    """A run's config.toml names the folder where it began; if the run was moved, it continues in its new folder."""
    if path is None or not file or any({"output", "name"} & set(layer.values.get("run", {})) for layer in flags):
        return []
    folder, run = Path(path).resolve().parent, file[0].values.get("run", {})
    if Path(path).name != "config.toml" or not (folder / RECORD).is_file() or not isinstance(run, dict):
        return []
    named = Path(str(run.get("output", ""))) / str(run.get("name", ""))
    if named.resolve() == folder:
        return []
    say(f"the run of {path} began in {named}; it continues in {folder}")
    return [Layer(file[0].name, {"run": {"output": str(folder.parent), "name": folder.name}})]


def gpu_if_auto(requested: Sequence[str], user: Sequence[Layer]) -> float | None:
    """For `--preset auto` the memory of the GPU that trains by the user's layers, else None."""
    if not any(name.strip() == AUTO for part in requested for name in part.split(",")):
        return None
    from lora_trainer.run.choices import gpu_gib_for_auto

    return gpu_gib_for_auto(user)


def _file_layer(path: str | None, problems: list[Problem]) -> list[Layer]:
    if path is None:
        return []
    try:
        layer = file_layer(f"--config {path}", Path(path))
    except UsageError as error:
        problems.extend(_other_config(path) or error.problems)
        return []
    types = section_types()
    ours = [
        name
        for name, values in layer.values.items()
        if name in types and isinstance(values, Mapping) and values.keys() & types[name].model_fields.keys()
    ]
    if 2 * len(ours) <= len(layer.values) and (foreign := _other_config(path)):
        problems.extend(foreign)
        return []
    return [replace(layer, values=_without_other_names(layer, problems))]


def _other_config(path: str) -> list[Problem]:
    """The problem of a config of another trainer; none for what no importer reads."""
    from lora_trainer.importers.documents import read_document
    from lora_trainer.importers.imported import format_of

    try:
        kind = format_of(read_document(Path(path)))
    except UsageError:
        return []
    if kind is None:
        return []
    fix = f"Convert it: lora-trainer import {shlex.quote(path)} --output NEW.toml, then use --config NEW.toml."
    return [Problem("config_of_other_trainer", f"--config {path} is a file of another trainer ({kind.name}).", fix)]


def _without_other_names(layer: Layer, problems: list[Problem]) -> dict[str, Any]:
    """The values without those that another trainer's name has set, each of which is a problem."""
    kept = dict[str, Any]()
    for section, values in layer.values.items():
        fields = section_types()[section].model_fields if section in section_types() else {}
        if not isinstance(values, Mapping):
            answer = _named_by_others(section)
            if answer:
                problems.append(Problem("unknown_setting", f"{section} (from {layer.name}) is not a setting.", answer))
            else:
                kept[section] = values
            continue
        answers = {key: "" if key in fields else _named_by_others(f"{section}.{key}") for key in values}
        kept[section] = {key: value for key, value in values.items() if not answers[key]}
        for key, answer in answers.items():
            if answer:
                problems.append(
                    Problem("unknown_setting", f"{section}.{key} (from {layer.name}) is not a setting.", answer)
                )
    return kept


def _flag_layers(arguments: argparse.Namespace, problems: list[Problem]) -> list[Layer]:
    """A layer for each flag, so that each value's origin names its flag; --set last."""
    layers: list[Layer] = []
    values = vars(arguments)
    for flag, setting, _, _ in SETTING_FLAGS:
        text = values.get(setting)
        if text is not None:
            section, key = setting.split(".")
            value: Any = text if setting in _TEXT_SETTINGS else parse_value(text)
            layers.append(Layer(flag, {section: {key: value}}))
    if values.get("data.sources"):
        layers.append(Layer("--data", {"data": {"sources": values["data.sources"]}}))
    if kind := values.get("profile"):
        layers.append(Layer("--profile", {"profile": PROFILES[kind]}))
    if values.get("offline"):
        layers.append(Layer("--offline", {"run": {"offline": True}}))
    for text in arguments.set:
        parsed = _misnamed(text) or parse_assignment(text)
        if isinstance(parsed, Problem):
            problems.append(parsed)
        else:
            section, key, value = parsed
            layers.append(Layer("--set", {section: {key: value}}))
    return layers


def say(text: str) -> None:
    """Print a line on stderr, in the main process only."""
    if is_main_process():
        print(folded(printable_lines(text), sys.stderr), file=sys.stderr)
