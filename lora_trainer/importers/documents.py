"""Parse other programs' files by their content, without trusting them.

The result has plain values only: no YAML tags, objects or pickles. A file of more than a few
megabytes, or one whose aliases expand too far, is refused.
"""

from __future__ import annotations

import json
import re
import shlex
import stat
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from lora_trainer.config.toml import refuse_large
from lora_trainer.core.bounded import TextError, decode
from lora_trainer.core.errors import Problem, UsageError

SCRIPT = "(script)"  # the key of a command's script
MOST_VALUES = 100_000  # after following aliases; a config has hundreds


def read_document(path: Path) -> Any:
    """A TOML, JSON or YAML file, or the flags of a shell command, as plain values.

    Raises UsageError with one problem for a file that is missing, not a file, too large, not text, damaged or
    hostile. The file's ending decides only which parser's error is shown.
    """
    text = _text(path)
    if not text.strip():
        raise UsageError(Problem("config_empty", f"{path} is empty.", "Name a config of another trainer."))
    complaints: dict[str, str] = {}
    for kind, parse in _PARSERS.items():
        try:
            value = parse(text)
        except UsageError as error:
            raise UsageError(
                Problem(error.problems[0].code, f"{path}: {error.problems[0].message}", error.problems[0].fix)
            ) from None
        except RecursionError:
            complaints[kind] = "it is nested too deeply"
        except (ValueError, yaml.YAMLError) as error:
            complaints[kind] = " ".join(str(error).split())[:200]
        else:
            if isinstance(value, dict | list) and value:
                return value
    kind = _ENDINGS.get(path.suffix.lower(), "JSON" if text.lstrip()[0] == "{" else "TOML" if "=" in text else "YAML")
    message = f"{path} is not valid {kind}: {complaints.get(kind, 'it has no settings')}."
    raise UsageError(
        Problem(
            "config_not_valid", message, "Correct or copy the file again; TOML, JSON, YAML and shell commands are read."
        )
    )


def _text(path: Path) -> str:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise UsageError(Problem("not_a_file", f"{path} is not a file.", "Name the config's file."))
        refuse_large(path, status.st_size)
        data = path.read_bytes()
    except FileNotFoundError:
        raise UsageError(Problem("file_missing", f"{path} does not exist.", "Check the path.")) from None
    except OSError as error:
        raise UsageError(
            Problem("file_unreadable", f"{path} cannot be read: {error.strerror}.", "Check its permissions.")
        ) from None
    try:
        text = decode(data)
    except TextError as error:
        fix = "Name the config, not the weights. If it is the config, save it as UTF-8."
        raise UsageError(Problem("file_unreadable", f"{path} {error}.", fix)) from None
    if "\0" in text:
        raise UsageError(Problem("file_not_text", f"{path} is not text.", "Name the config, not the weights."))
    return text


def _flags(text: str) -> dict[str, Any]:
    """The longest command's `--flag value` pairs; a flag without a value is true, one with several a list."""
    lines = text.replace("\\\r\n", " ").replace("\\\n", " ").replace("^\n", " ").splitlines()
    commands = [line for line in lines if re.search(r"\s--[a-z]", line) and not line.lstrip().startswith("#")]
    if not commands:
        raise ValueError("there is no command with flags in it")
    variables = _variables(lines)
    words = shlex.split(max(commands, key=lambda line: line.count(" --")), comments=True)
    script = next((place for place, word in enumerate(words) if word.endswith(".py")), 0)
    # The launcher's own flags precede the script; the precision and the number of processes matter to the run.
    launcher = {
        key: value
        for key, value in _values_of_flags(words[:script], variables).items()
        if key in ("mixed_precision", "num_processes")
    }
    found = {**launcher, **_values_of_flags(words[script:], variables)}
    return {SCRIPT: words[script], **found} if words[script].endswith(".py") else found


def _values_of_flags(words: list[str], variables: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    flag = ""
    for word in words:
        if re.match(r"--[a-zA-Z]", word):
            flag, equals, value = word[2:].partition("=")
            found[flag] = _filled(value, variables) if equals else True
            if equals:
                flag = ""
        elif flag:
            value = _filled(word, variables)
            found[flag] = value if found[flag] is True else [*_as_list(found[flag]), value]
    return found


def _variables(lines: list[str]) -> dict[str, str]:
    """`export NAME="value"` of a script."""
    found = re.findall(r"^\s*(?:export\s+|set\s+)?(\w+)=(.*)$", "\n".join(lines), re.MULTILINE)
    return {name: " ".join(shlex.split(value)) for name, value in found if "`" not in value and "$(" not in value}


def _filled(word: str, variables: Mapping[str, str]) -> str:
    return re.sub(r"\$\{?(\w+)\}?", lambda match: variables.get(match[1], match[0]), word)


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _yaml(text: str) -> Any:
    """Plain YAML. Raises UsageError for a bomb of aliases and for a tag that would make an object."""
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if _values(node, {}, set()) > MOST_VALUES:
            message = f"it grows to more than {MOST_VALUES:,} values when its aliases are followed."
            raise UsageError(Problem("config_too_large", message, "Write the values out."))
        return loader.construct_document(node)
    except yaml.constructor.ConstructorError as error:
        problem = " ".join(str(error.problem or error).split())
        raise UsageError(
            Problem("config_not_valid", f"{problem}.", "Only plain values are read; remove the tag.")
        ) from None
    finally:
        loader.dispose()


def _values(node: Any, known: dict[int, int], above: set[int]) -> int:
    """Number of values of a node with all aliases expanded; a node that contains itself has no end."""
    if id(node) in above:
        return MOST_VALUES + 1
    if id(node) not in known:
        children = node.value if isinstance(node.value, list) else []
        flat = [each for child in children for each in (child if isinstance(child, tuple) else (child,))]
        known[id(node)] = 1 + sum(_values(each, known, above | {id(node)}) for each in flat)
    return known[id(node)]


_PARSERS: Mapping[str, Callable[[str], Any]] = {
    "JSON": json.loads,
    "TOML": tomllib.loads,
    "YAML": _yaml,  # before flags, which a prompt may contain
    "a shell command": _flags,
}
_ENDINGS = {".json": "JSON", ".toml": "TOML", ".yaml": "YAML", ".yml": "YAML", ".sh": "a shell command"}
