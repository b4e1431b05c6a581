"""SimpleTuner's `config.json` and `multidatabackend.json`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.importers.documents import read_document
from lora_trainer.importers.flow_words import NOT_READ, SIMPLETUNER_DEFAULTS, is_simpletuner_flow, of_flows
from lora_trainer.importers.merge import add_together, flattened, no_validation, read_tables
from lora_trainer.importers.reading import Line, Reading, found_upwards, is_empty
from lora_trainer.importers.simpletuner_keys import BACKEND_DEFAULTS, BACKEND_RULES, DEFAULTS, RULES

TOOL = "SimpleTuner"
MARKS = ("data_backend_config", "model_family", "model_type", "lora_type", "base_model_precision", "model_flavour")
MARKS_OF_DATA = ("instance_data_dir", "dataset_type", "dataset_name", "metadata_backend")
KINDS_OF_IMAGES = ("image", "conditioning")


def is_simpletuner(document: Any) -> bool:
    """Whether a parsed JSON is a config of SimpleTuner."""
    return isinstance(document, Mapping) and sum(key in without_dashes(document) for key in MARKS) >= 2


def is_backends(document: Any) -> bool:
    """Whether a parsed JSON is a list of its datasets."""
    tables = isinstance(document, list) and all(isinstance(each, Mapping) for each in document)
    return tables and any(key in each for each in document for key in MARKS_OF_DATA)


def without_dashes(document: Mapping[str, Any]) -> dict[str, Any]:
    """`--learning_rate` and `learning_rate` are the same key."""
    return {re.sub(r"^--", "", str(key)): value for key, value in document.items()}


def read(path: Path, document: Mapping[str, Any]) -> Reading:
    """Read a config, with the datasets of the file that it names."""
    reading = Reading(TOOL, path)
    keys = without_dashes(document)
    defaults = dict(DEFAULTS)
    if not is_empty(keys.get("max_train_steps")) and str(keys["max_train_steps"]) != "0":
        defaults.pop("num_train_epochs", None)
    flow = is_simpletuner_flow(keys)
    rules = of_flows(RULES, NOT_READ, "ignored") if flow else RULES
    reading.take_all(keys, rules, {**defaults, **(SIMPLETUNER_DEFAULTS if flow else {})})
    no_validation(reading)
    named = keys.get("data_backend_config")
    if isinstance(named, str) and named and not reading.problems:
        add_backends_of_file(reading, named, keys)
    return reading


def add_backends_of_file(reading: Reading, named: str, keys: Mapping[str, Any]) -> None:
    """The datasets of the file that `data_backend_config` names; none if it is missing, which its rule reports."""
    backends = found_upwards(reading.path.parent, named)
    if backends is None:
        return
    try:
        listed = read_document(backends)
        if not is_backends(listed):
            raise UsageError(Problem(f"{backends} lists no datasets.", "Name the file with data_backend_config."))
    except UsageError as error:
        reading.problems.extend(error.problems)
    else:
        add_backends(reading, listed, keys, backends.parent)


def read_backends(path: Path, document: Sequence[Mapping[str, Any]]) -> Reading:
    """Read a list of datasets by itself."""
    reading = Reading(TOOL, path)
    add_backends(reading, document, {}, path.parent)
    return reading


def add_backends(reading: Reading, listed: Sequence[Any], keys: Mapping[str, Any], folder: Path) -> None:
    """Each dataset of images becomes a source; masks are joined to the images that they are of."""
    tables: list[dict[str, Any]] = []
    masks: dict[str, Any] = {}
    for index, each in enumerate(listed):
        table = {str(key): value for key, value in each.items()} if isinstance(each, Mapping) else {}
        name = f"backends[{index}]"
        kind, store = str(table.get("dataset_type", "image")), str(table.get("type", "local"))
        if table.get("disabled") or table.get("disable"):
            reading.lines.append(Line(name, table.get("id"), "ignored", {}, "disabled"))
        elif kind.endswith("_embeds"):
            reading.lines.append(Line(name, table.get("id"), "ignored", {}, "caches are this program's own"))
        elif kind not in KINDS_OF_IMAGES or store not in ("local", "parquet", "csv"):
            why = f"skipped: {kind} from {store} is not read; name a local folder of images with --data"
            reading.lines.append(Line(name, table.get("id"), "changed", {}, why))
        elif kind == "conditioning":
            masks[str(table.get("id"))] = table
            why = "masks of the datasets that name it" if table.get("conditioning_type") == "mask" else "not read"
            verdict = "mapped" if table.get("conditioning_type") == "mask" else "changed"
            reading.lines.append(Line(name, table.get("id"), verdict, {}, why))  # type: ignore[arg-type]
        else:
            tables.append(table)
    for table in tables:
        mask = masks.get(str(table.get("conditioning_data")), {})
        if mask.get("conditioning_type") == "mask":
            table["conditioning_data"] = mask.get("instance_data_dir")
    also = {f"config.{key}": value for key, value in keys.items()}
    below = Reading(reading.tool, folder / "multidatabackend.json")
    found = read_tables(
        below, "backends", [flattened(table) for table in tables], BACKEND_RULES, BACKEND_DEFAULTS, also
    )
    reading.lines.extend(below.lines)
    reading.problems.extend(below.problems)
    if found := [each for each in found if "source.path" in each]:
        add_together(reading, "backends", found)
