"""Models of images and texts, such as CLIP or SigLIP, that say how well captions suit an image: safetensors only, no code of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lora_trainer.models.folder import read_config
from lora_trainer.models.pretrained import LOCAL, explaining_folder, load_pretrained
from lora_trainer.models.vision_encoder import EXPECTED, check_vision_encoder

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from PIL import Image
    from torch import Tensor

PART = 0.8  # of an image's sides, of the five parts that are seen beside the whole
CORNERS = ((0.0, 0.0), (1.0, 0.0), (0.5, 0.5), (0.0, 1.0), (1.0, 1.0))  # of what is left over

# An image and K captions -> how little each suits, [K, V]: 1 - cosine, for each of the image's V views.
Mismatches = Callable[["Image.Image"], "Tensor"]


def load_text_matcher(folder: Path, captions: Sequence[str], device: torch.device) -> Mismatches:
    """How little each of K captions suits an image: a function that returns [K, 6], fp32 on the CPU.

    An image is seen whole and in five parts, so that there is more than one measurement of it. Captions are cut where the
    model's texts end (77 tokens of CLIP). Raises UsageError for a model of another kind.
    """
    import torch
    from torch.nn.functional import normalize

    stored_numbers = check_vision_encoder(folder)
    config = read_config(folder, "config.json")
    with explaining_folder(folder, config.get("architectures") or (), EXPECTED):
        from transformers import AutoImageProcessor, AutoModel, AutoTokenizer

        image_processor = AutoImageProcessor.from_pretrained(folder, backend="pil", **LOCAL)
        tokenizer = AutoTokenizer.from_pretrained(folder, **LOCAL)
        model: Any = load_pretrained(AutoModel, folder, device, stored_numbers).float().requires_grad_(False)
        longest = min(tokenizer.model_max_length, model.config.text_config.max_position_embeddings)
        tokens = tokenizer(
            list(captions), padding="max_length", truncation=True, max_length=longest, return_tensors="pt"
        ).to(device)
        with torch.no_grad():
            found = model.get_text_features(**tokens)
        texts = normalize(found.pooler_output, dim=1)

    @torch.no_grad()
    def mismatches(image: Image.Image) -> Tensor:
        inputs = image_processor(images=views_of(image), return_tensors="pt").to(device)
        seen = model.get_image_features(**inputs)
        features = normalize(seen.pooler_output, dim=1)
        return (1.0 - texts @ features.T).cpu()

    return mismatches


def views_of(image: Image.Image) -> list[Image.Image]:
    """The image whole, and its parts at four corners and in the middle."""
    width, height = (max(1, round(PART * side)) for side in image.size)
    views = [image]
    for across, down in CORNERS:
        left, top = round(across * (image.width - width)), round(down * (image.height - height))
        views.append(image.crop((left, top, left + width, top + height)))
    return views
