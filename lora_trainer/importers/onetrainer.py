"""OneTrainer's JSON, with its concepts inline or in a file of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lora_trainer.core.errors import UsageError
from lora_trainer.importers.documents import read_document
from lora_trainer.importers.flow_words import NOT_OF_FLOWS, is_onetrainer_flow, of_flows
from lora_trainer.importers.merge import add_together, flattened, no_validation, read_tables
from lora_trainer.importers.onetrainer_concepts import CONCEPT_DEFAULTS, CONCEPT_RULES
from lora_trainer.importers.onetrainer_keys import DEFAULTS, RULES, UNREAD_TABLES
from lora_trainer.importers.reading import Line, Reading, located

TOOL = "OneTrainer"
MARKS = ("training_method", "base_model_name", "concept_file_name", "output_model_destination", "layer_filter_preset")
USUAL_CONCEPTS = "training_concepts/concepts.json"


def is_onetrainer(document: Any) -> bool:
    """Whether a parsed JSON is a config of OneTrainer."""
    return isinstance(document, Mapping) and sum(key in document for key in MARKS) >= 2


def is_concepts(document: Any) -> bool:
    """Whether a parsed JSON is a list of its concepts."""
    tables = isinstance(document, list) and all(isinstance(each, Mapping) for each in document)
    return tables and any("path" in each and ("image" in each or "text" in each) for each in document)


def read(path: Path, document: Mapping[str, Any]) -> Reading:
    """Read a config, with its concepts."""
    reading = Reading(TOOL, path)
    tables = [key for key, value in document.items() if key in UNREAD_TABLES and isinstance(value, Mapping)]
    keys = flattened({key: value for key, value in document.items() if key not in ("concepts", "samples", *tables)})
    keys.update(dict.fromkeys(tables, "{…}"))  # of these no key matters here; some hold passwords
    if isinstance(document.get("samples"), list):
        keys["samples"] = document["samples"]
    rules = of_flows(RULES, NOT_OF_FLOWS, "changed") if is_onetrainer_flow(keys) else RULES
    reading.take_all(keys, rules, DEFAULTS)
    no_validation(reading)
    concepts = document.get("concepts")
    if not isinstance(concepts, list) and not reading.problems:
        concepts = _concepts_of_file(reading, keys)
    add_concepts(reading, concepts or [], keys)
    return reading


def read_concepts(path: Path, document: Sequence[Any]) -> Reading:
    """Read a list of concepts by itself."""
    reading = Reading(TOOL, path)
    add_concepts(reading, document, {})
    return reading


def _concepts_of_file(reading: Reading, keys: Mapping[str, Any]) -> list[Any]:
    """The concepts of the file that is named; the usual file may be missing, one that is named may not."""
    named = keys.get("concept_file_name")
    path = Path(located(reading.path.parent, str(named or USUAL_CONCEPTS)))
    if not named and not path.is_file():
        return []
    try:
        listed = read_document(path)
    except UsageError as error:
        reading.problems.extend(error.problems)
        return []
    return listed if isinstance(listed, list) else []


def add_concepts(reading: Reading, concepts: Sequence[Any], keys: Mapping[str, Any]) -> None:
    """Each concept that is trained becomes a source."""
    tables: list[dict[str, Any]] = []
    for index, each in enumerate(concepts):
        table = flattened(each) if isinstance(each, Mapping) else {}
        name = table.get("name") or table.get("path")
        if table.get("enabled") is False:
            reading.lines.append(Line(f"concepts[{index}]", name, "ignored", {}, "not enabled"))
        elif str(table.get("type", "STANDARD")).upper() == "VALIDATION":
            why = "skipped: set validation.split, which keeps images for validation"
            reading.lines.append(Line(f"concepts[{index}]", name, "changed", {}, why))
        else:
            tables.append(table)
    also = {f"config.{key}": value for key, value in keys.items()}
    found = read_tables(reading, "concepts", tables, CONCEPT_RULES, CONCEPT_DEFAULTS, also)
    if found := [each for each in found if "source.path" in each]:
        add_together(reading, "concepts", found)
