"""ai-toolkit's YAML: a job with one process, whose parts are network, save, datasets, train, model and sample."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lora_trainer.core.errors import Problem
from lora_trainer.importers.aitoolkit_keys import DATASET_DEFAULTS, DATASET_RULES, DEFAULTS, RULES
from lora_trainer.importers.flow_words import AITOOLKIT_DEFAULTS, NOT_OF_FLOWS, is_aitoolkit_flow, of_flows
from lora_trainer.importers.merge import add_together, flattened, no_validation, read_tables
from lora_trainer.importers.reading import Line, Reading

TOOL = "ai-toolkit"


def is_aitoolkit(document: Any) -> bool:
    """Whether a parsed YAML is a training job."""
    config = document.get("config") if isinstance(document, Mapping) else None
    return isinstance(config, Mapping) and isinstance(config.get("process"), list)


def read(path: Path, document: Mapping[str, Any]) -> Reading:
    """Read a job. Keys are named by their place below the process: `train.lr`, `datasets[0].folder_path`."""
    reading = Reading(TOOL, path)
    config = document["config"]
    processes = [each for each in config["process"] if isinstance(each, Mapping)]
    if not processes:
        reading.problems.append(Problem(f"{path}: config.process has no process.", "Add one."))
        return reading
    process = dict(processes[0])
    for each in processes[1:]:
        reading.lines.append(Line("config.process", each.get("type"), "changed", {}, "only the first process is read"))
    datasets = process.pop("datasets", None)
    keys = {key: value for key, value in document.items() if key not in ("config", "meta")}
    keys.update({f"config.{key}": value for key, value in config.items() if key != "process"})
    meta = document.get("meta")
    keys.update({f"meta.{key}": value for key, value in meta.items()} if isinstance(meta, Mapping) else {})
    keys.update(flattened(process))
    flow = is_aitoolkit_flow(keys)
    rules = of_flows(RULES, NOT_OF_FLOWS, "changed") if flow else RULES
    defaults = {**DEFAULTS, **(AITOOLKIT_DEFAULTS if flow else {})}
    reading.take_all(_named(keys, str(config.get("name", ""))), rules, defaults)
    no_validation(reading)
    tables = [each for each in datasets if isinstance(each, Mapping)] if isinstance(datasets, list) else []
    if not tables:
        return reading
    found = read_tables(reading, "datasets", tables, DATASET_RULES, DATASET_DEFAULTS)
    if found := [each for each in found if "source.path" in each]:
        add_together(reading, "datasets", found)
    return reading


def _named(keys: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Replace `[name]` by the job's name."""
    return {
        key: re.sub(r"\[name\]", lambda match: name, value) if isinstance(value, str) else value
        for key, value in keys.items()
    }
