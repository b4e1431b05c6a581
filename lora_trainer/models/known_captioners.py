"""Captioners and taggers that `lora-trainer caption` knows by name. Standard library only.

Sizes are of the files that are downloaded, rounded; licenses are those of the weights. None of them was downloaded by the
project: a repository that has moved or changed is refused by name, with what to do.
"""

from __future__ import annotations

from dataclasses import dataclass

FILES_OF_CAPTIONERS = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")
ONNX, TAGS = "model.onnx", "selected_tags.csv"  # a WD14 tagger: its network, and the names of its labels


@dataclass(frozen=True)
class KnownCaptioner:
    """A repository of the hub, and what a user should know before its download."""

    repository: str
    gigabytes: float
    license: str
    writes: str = "captions"  # or tags
    revision: str | None = None

    @property
    def files(self) -> tuple[str, ...]:
        """Patterns of the files that are needed; pickles are never among them."""
        return (ONNX, TAGS) if self.writes == "tags" else FILES_OF_CAPTIONERS


QWEN_RESEARCH = "Qwen Research License (no commercial use)"
LLAMA = "Llama 3.1 Community License"

KNOWN_CAPTIONERS = {
    # Microsoft's own repositories need code of their own; these hold the same weights for transformers' class.
    "florence-2-base": KnownCaptioner("florence-community/Florence-2-base", 0.5, "MIT"),
    "florence-2-large": KnownCaptioner("florence-community/Florence-2-large", 1.6, "MIT"),
    "qwen2.5-vl-3b": KnownCaptioner("Qwen/Qwen2.5-VL-3B-Instruct", 7.5, QWEN_RESEARCH),
    "qwen2.5-vl-7b": KnownCaptioner("Qwen/Qwen2.5-VL-7B-Instruct", 16.6, "Apache 2.0"),
    "qwen3-vl-2b": KnownCaptioner("Qwen/Qwen3-VL-2B-Instruct", 4.3, "Apache 2.0"),
    "qwen3-vl-4b": KnownCaptioner("Qwen/Qwen3-VL-4B-Instruct", 8.9, "Apache 2.0"),
    "qwen3-vl-8b": KnownCaptioner("Qwen/Qwen3-VL-8B-Instruct", 17.5, "Apache 2.0"),
    "joycaption": KnownCaptioner("fancyfeast/llama-joycaption-beta-one-hf-llava", 17.0, LLAMA),
    # The main branch holds a pickle alone; this commit of the repository adds the same weights in safetensors.
    "blip-base": KnownCaptioner(
        "Salesforce/blip-image-captioning-base",
        1.0,
        "BSD 3-Clause",
        revision="9cfcdbcaccbcadb2b53b36d4b50042c4eeaa0c25",
    ),
    "blip-large": KnownCaptioner("Salesforce/blip-image-captioning-large", 1.9, "BSD 3-Clause"),
    "wd-vit-v3": KnownCaptioner("SmilingWolf/wd-vit-tagger-v3", 0.4, "Apache 2.0", "tags"),
    "wd-swinv2-v3": KnownCaptioner("SmilingWolf/wd-swinv2-tagger-v3", 0.5, "Apache 2.0", "tags"),
    "wd-eva02-large-v3": KnownCaptioner("SmilingWolf/wd-eva02-large-tagger-v3", 1.3, "Apache 2.0", "tags"),
}
