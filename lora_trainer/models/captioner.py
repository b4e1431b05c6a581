"""Describe images in sentences or tags with a model in a local folder: safetensors only, no network, no code of its own.

Two kinds: models that write a sentence from an image alone (BLIP, GIT, an image encoder with a text
decoder), and classifiers with many labels, which give tags.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.models.folder import check_part, read_config
from lora_trainer.models.pretrained import LOCAL, explaining_folder, load_pretrained

if TYPE_CHECKING:
    import torch
    from PIL import Image

TAGS = "selected_tags.csv"  # names of a tagger's labels, as the well-known taggers bring them
RATING = "9"  # the category of labels that rate an image in place of describing it
NAMELESS = re.compile(r"LABEL_\d+")
EXPECTED = (
    "Expected a transformers folder (BLIP, GIT or an image classifier): config.json, *.safetensors and the files of its "
    "image processor (and tokenizer)."
)


@dataclass(frozen=True)
class Captioner:
    """`describe` gives one text for each RGB image, which may be empty."""

    kind: Literal["captions", "tags"]
    describe: Callable[[Sequence[Image.Image]], list[str]]


def load_captioner(folder: Path, device: torch.device, *, threshold: float = 0.35, most_tokens: int = 60) -> Captioner:
    """The captioner or tagger in a folder. Tags are labels of at least `threshold`, the surest first.

    Raises UsageError for a folder that holds no such model, or only pickles of one.
    """
    if not folder.is_dir():
        raise UsageError(Problem("model_missing", f"There is no model folder at {folder}.", EXPECTED))
    config = read_config(folder, "config.json", expected=EXPECTED)
    stored_numbers = check_part(folder)
    architectures = [str(name) for name in config.get("architectures") or ()]
    with explaining_folder(folder, architectures, EXPECTED):
        if any(name.endswith("ForImageClassification") for name in architectures):
            return _tagger(folder, device, threshold, stored_numbers)
        return _writer(folder, config, device, most_tokens, stored_numbers)


def _writer(
    folder: Path, config: dict[str, Any], device: torch.device, most_tokens: int, stored_numbers: int
) -> Captioner:
    import torch
    from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    kind = str(config.get("model_type"))
    if kind not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        fix = "Name a captioner (BLIP, GIT, …) or an image classifier with many labels."
        raise UsageError(
            Problem("captioner_unsupported", f"{folder} holds a {kind} model, which describes no images.", fix)
        )
    if (folder / "chat_template.jinja").exists() or (folder / "chat_template.json").exists():
        message = f"{folder} holds a {kind} model that answers in a conversation."
        raise UsageError(
            Problem(
                "captioner_unsupported", message, "Name one that describes an image by itself, such as BLIP or GIT."
            )
        )
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil", **LOCAL)
    tokenizer = AutoTokenizer.from_pretrained(folder, **LOCAL)
    model = load_pretrained(AutoModelForImageTextToText, folder, device, stored_numbers)

    def describe(images: Sequence[Image.Image]) -> list[str]:
        pixels = processor(images=list(images), return_tensors="pt")["pixel_values"].to(device)
        with torch.inference_mode():
            tokens = model.generate(pixel_values=pixels, max_new_tokens=most_tokens, do_sample=False)
        return [" ".join(text.split()) for text in tokenizer.batch_decode(tokens, skip_special_tokens=True)]

    return Captioner("captions", describe)


def _tagger(folder: Path, device: torch.device, threshold: float, stored_numbers: int) -> Captioner:
    import torch
    from transformers import AutoImageProcessor, AutoModelForImageClassification

    processor = AutoImageProcessor.from_pretrained(folder, backend="pil", **LOCAL)
    model = load_pretrained(AutoModelForImageClassification, folder, device, stored_numbers)
    labels = _labels(folder, model.config.id2label)
    together = model.config.problem_type == "multi_label_classification" or (folder / TAGS).exists()

    def describe(images: Sequence[Image.Image]) -> list[str]:
        pixels = processor(images=list(images), return_tensors="pt")["pixel_values"].to(device)
        with torch.inference_mode():
            scores = model(pixel_values=pixels).logits.float()
        shares = scores.sigmoid() if together else scores.softmax(-1)  # [B, labels]
        return [", ".join(_surest(row, labels, threshold)) for row in shares.tolist()]

    return Captioner("tags", describe)


def _surest(shares: Sequence[float], labels: Sequence[str], threshold: float) -> list[str]:
    """Labels of at least `threshold`, the surest first; those without a name are skipped."""
    order = sorted(range(len(labels)), key=lambda place: (-shares[place], place))
    return [labels[place] for place in order if shares[place] >= threshold and labels[place]]


def _labels(folder: Path, named: dict[int, str]) -> list[str]:
    """The name of each label; ratings have none. Raises UsageError where names are missing or do not fit."""
    names = [str(named[place]) for place in sorted(named)]
    path = folder / TAGS
    if path.is_file():
        with open(path, encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        if len(rows) != len(names) or any("name" not in row for row in rows):
            message = f"{path} names {len(rows)} labels; the model has {len(names)}."
            raise UsageError(Problem("captioner_invalid", message, "Copy both from the same place."))
        names = ["" if row.get("category") == RATING else str(row["name"]) for row in rows]
    elif all(NAMELESS.fullmatch(name) for name in names):
        raise UsageError(
            Problem(
                "captioner_invalid", f"{folder} has {len(names)} labels without names.", f"Put its {TAGS} beside it."
            )
        )
    return [name.replace("_", " ") if len(name) > 3 else name for name in names]  # `^_^` stays
