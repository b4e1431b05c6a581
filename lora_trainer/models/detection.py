"""Which family the model of a folder belongs to. No torch."""

from __future__ import annotations

from pathlib import Path

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.folder import read_index


def detect_family(folder: Path, origin: str = "--model") -> str:
    """The family of a model folder, by its pipeline's class, and by its own test where families share a pipeline.

    Raises UsageError for models that cannot be trained; `origin` is the flag or setting that names the folder.
    """
    if not folder.exists():
        raise UsageError(Problem("model_missing", f"There is no model at {folder}.", f"Check {origin}."))
    pipeline = str(read_index(folder).get("_class_name", ""))
    for name, family in FAMILIES.items():
        if pipeline in (family.pipeline.class_name, *family.pipeline.edit_class_names) and family.recognizes(folder):
            return name
        if what := family.pipeline.refused.get(pipeline):
            message = f"{folder} is {what} ({pipeline}), which cannot be trained yet."
            raise UsageError(
                Problem("model_unsupported", message, f"Use a base model of {name} that makes images from text.")
            )
    known = ", ".join(
        dict.fromkeys(
            kind for each in FAMILIES.values() for kind in (each.pipeline.class_name, *each.pipeline.edit_class_names)
        )
    )
    raise UsageError(
        Problem("model_unsupported", f"{folder} holds a {pipeline or 'nameless'} model.", f"Supported: {known}.")
    )
