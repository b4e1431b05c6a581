"""Tag images: WD14 taggers as ONNX, and image classifiers of transformers with many labels."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.core.errors import Problem, UsageError, first_line, is_out_of_memory
from lora_trainer.models.known_captioners import ONNX, TAGS
from lora_trainer.models.pretrained import LOCAL, load_pretrained

if TYPE_CHECKING:
    import torch
    from PIL import Image

Describe = Callable[[Sequence["Image.Image"]], list[list[str]]]  # the texts of each image, the best first

RATING = "9"  # the category of labels that rate an image in place of describing it
NAMELESS = re.compile(r"LABEL_\d+")
# onnxruntime's names of what it can compute on, the fastest first.
PROVIDERS = ("CUDAExecutionProvider", "ROCMExecutionProvider", "DmlExecutionProvider", "CPUExecutionProvider")
WHITE = (255, 255, 255)


def load_onnx_tagger(folder: Path, threshold: float, blacklist: Collection[str]) -> Describe:
    """A WD14 tagger. It wants squares with white borders, [B, side, side, 3] in BGR from 0 to 255, and gives probabilities.

    Raises UsageError for other networks, and where onnxruntime is not installed.
    Source: https://huggingface.co/spaces/SmilingWolf/wd-tagger
    """
    import numpy as np
    from PIL import Image, ImageOps

    onnxruntime = import_onnxruntime()
    path = folder / ONNX
    try:
        available = onnxruntime.get_available_providers()
        session = onnxruntime.InferenceSession(path, providers=[each for each in PROVIDERS if each in available])
    except Exception as error:  # onnxruntime raises a class of its own for each of its status codes
        raise UsageError(
            Problem("model_not_loaded", f"{path} cannot be loaded: {first_line(error)}.", "Copy or download it again.")
        ) from error
    given, made = session.get_inputs()[0], session.get_outputs()[0]
    shape, scores = list(given.shape), list(made.shape)
    reads_squares = len(shape) == 4 and shape[3] == 3 and isinstance(shape[1], int) and shape[1] == shape[2]
    if not reads_squares or len(scores) != 2 or not isinstance(scores[1], int):
        message = f"{path} makes {scores} of {shape}; WD14 taggers make [images, labels] of [images, side, side, 3]."
        raise UsageError(Problem("captioner_unsupported", message, "Name a WD14 tagger."))
    side, labels = shape[1], _labels(folder, dict.fromkeys(range(scores[1]), ""))

    def describe(images: Sequence[Image.Image]) -> list[list[str]]:
        squares = [ImageOps.pad(each, (side, side), Image.Resampling.BICUBIC, color=WHITE) for each in images]
        pixels = np.stack([np.asarray(each, dtype=np.float32)[:, :, ::-1] for each in squares])
        # Some networks take a fixed number of images: the last ones are filled up with black.
        batch = shape[0] if isinstance(shape[0], int) and shape[0] > 0 else len(images)
        pixels = np.pad(pixels, ((0, -len(images) % batch), (0, 0), (0, 0), (0, 0)))
        try:
            rows = [
                row
                for start in range(0, len(pixels), batch)
                for row in session.run([made.name], {given.name: pixels[start : start + batch]})[0].tolist()  # [labels]
            ]
        except Exception as error:
            if is_out_of_memory(error):
                raise
            message = f"{path} cannot be run: {first_line(error)}."
            fix = "Try a smaller --batch-size, or another tagger."
            raise UsageError(Problem("captioner_invalid", message, fix)) from error
        return [tags_of(row, labels, threshold, blacklist) for row in rows[: len(images)]]

    return describe


def import_onnxruntime() -> Any:
    """The library that runs WD14 taggers. Raises UsageError where it is missing or broken."""
    try:
        import onnxruntime
    except ImportError as error:
        message = f"WD14 taggers need onnxruntime ({first_line(error)})."
        raise UsageError(Problem("library_missing", message, "pip install 'lora-trainer[onnx]'")) from error
    return onnxruntime


def load_tagger(
    folder: Path, device: torch.device, stored_numbers: int, threshold: float, blacklist: Collection[str]
) -> Describe:
    """An image classifier. Raises UsageError for labels without names."""
    import torch
    from transformers import AutoImageProcessor, AutoModelForImageClassification

    processor = AutoImageProcessor.from_pretrained(folder, backend="pil", **LOCAL)
    model = load_pretrained(AutoModelForImageClassification, folder, device, stored_numbers)
    labels = _labels(folder, model.config.id2label)
    together = model.config.problem_type == "multi_label_classification" or (folder / TAGS).exists()

    def describe(images: Sequence[Image.Image]) -> list[list[str]]:
        pixels = processor(images=list(images), return_tensors="pt")["pixel_values"].to(device)
        with torch.inference_mode():
            scores = model(pixel_values=pixels).logits.float()
        shares = scores.sigmoid() if together else scores.softmax(-1)  # [B, labels]
        return [tags_of(row, labels, threshold, blacklist) for row in shares.tolist()]

    return describe


def tags_of(shares: Sequence[float], labels: Sequence[str], threshold: float, blacklist: Collection[str]) -> list[str]:
    """One text of the labels of at least `threshold`, the surest first; none where there are none.

    Labels without a name and those of the blacklist are left out.
    """
    unwanted = {_spaced(each).casefold() for each in blacklist}
    order = sorted(range(len(labels)), key=lambda place: (-shares[place], place))
    found = [labels[place] for place in order if shares[place] >= threshold]
    wanted = [each for each in found if each and each.casefold() not in unwanted]
    return [", ".join(wanted)] if wanted else []


def _labels(folder: Path, named: dict[int, str]) -> list[str]:
    """The name of each label; ratings have none. Raises UsageError where names are missing or do not fit."""
    names = [str(named[place]) for place in sorted(named)]
    path = folder / TAGS
    if path.is_file():
        try:
            with open(path, encoding="utf-8", newline="") as file:
                rows = list(csv.DictReader(file))
        except (UnicodeError, csv.Error) as error:
            message = f"{path} cannot be read as a table in UTF-8: {first_line(error)}."
            raise UsageError(Problem("captioner_invalid", message, "Copy or download it again.")) from error
        if len(rows) != len(names) or any("name" not in row for row in rows):
            message = f"{path} names {len(rows)} labels; the model has {len(names)}."
            raise UsageError(Problem("captioner_invalid", message, "Copy both from the same place."))
        names = ["" if row.get("category") == RATING else str(row["name"]) for row in rows]
    elif all(not name or NAMELESS.fullmatch(name) for name in names):
        raise UsageError(
            Problem(
                "captioner_invalid", f"{folder} has {len(names)} labels without names.", f"Put its {TAGS} beside it."
            )
        )
    return [_spaced(name) for name in names]


def _spaced(name: str) -> str:
    """A label as it is written in captions: `red_hair` with a space, `^_^` as it is."""
    name = name.strip()
    return name.replace("_", " ") if len(name) > 3 else name
