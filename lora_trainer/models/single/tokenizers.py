"""Tokenizers for checkpoints, which hold none: CLIP's comes with the package, others from this computer."""

from __future__ import annotations

import functools
import json
import os
import shutil
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.io import write_json
from lora_trainer.models.places import WEIGHTS

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CLIP = files("lora_trainer.models.single") / "clip"
END, FIRST = (
    "<|endoftext|>",
    "!",
)  # padding of short captions; OpenCLIP's models were trained with the latter
FILLED_WITH = {"open_clip_h": FIRST, "open_clip_g": FIRST, "clip_g": FIRST}
# Models of a hub, often downloaded already, that have the tokenizer of a kind.
REPOSITORIES = {
    "t5": (
        ("black-forest-labs/FLUX.1-dev", "tokenizer_2"),
        ("black-forest-labs/FLUX.1-schnell", "tokenizer_2"),
        ("lodestones/Chroma1-HD", "tokenizer"),
        ("lodestones/Chroma1-Base", "tokenizer"),
        ("stabilityai/stable-diffusion-3.5-medium", "tokenizer_3"),
        ("stabilityai/stable-diffusion-3.5-large", "tokenizer_3"),
        ("stabilityai/stable-diffusion-3-medium-diffusers", "tokenizer_3"),
        ("circlestone-labs/Anima-Base-v1.0-Diffusers", "t5_tokenizer"),
    ),
    "qwen2_5_vl": tuple((f"Qwen/Qwen-Image{name}", "tokenizer") for name in ("", "-2512", "-Edit-2511", "-Edit-2509")),
    "qwen3_vl": (
        ("krea/Krea-2-Raw", "tokenizer"),
        ("krea/Krea-2-Turbo", "tokenizer"),
        ("Qwen/Qwen-Image-2.1", "processor"),
        ("Qwen/Qwen-Image-2.1-Turbo", "processor"),
    ),
    "qwen3": (
        ("Tongyi-MAI/Z-Image-Turbo", "tokenizer"),
        ("Tongyi-MAI/Z-Image", "tokenizer"),
        *((f"black-forest-labs/FLUX.2-klein-{kind}", "tokenizer") for kind in ("base-4B", "4B", "base-9B", "9B")),
        ("circlestone-labs/Anima-Base-v1.0-Diffusers", "tokenizer"),
    ),
}
LACK_TOKENIZER = tuple(REPOSITORIES)  # kinds whose tokenizer does not come with the package
WEIGHTS_OF_OTHERS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".msgpack", ".h5", ".onnx", ".index.json")
ORIGINS = {
    "t5": ("T5", "any FLUX.1 or SD3 folder has one"),
    "qwen3": ("Qwen3", "any Z-Image, FLUX.2 klein or Anima folder has one"),
    "qwen2_5_vl": ("Qwen2.5-VL", "any Qwen-Image folder has one"),
    "qwen3_vl": ("Qwen3-VL", "any Krea 2 or Qwen-Image 2.1 folder has one"),
}


@functools.cache
def clip_words() -> frozenset[str]:
    """The words, ASCII letters in lower case, that CLIP's vocabulary has as one token: its 33,000 most frequent ones."""
    vocabulary = json.loads((CLIP / "tokenizer.json").read_text("utf-8"))["model"]["vocab"]
    words = (token.removesuffix("</w>") for token in vocabulary if token.endswith("</w>"))
    return frozenset(word for word in words if word.isascii() and word.isalpha())


@functools.lru_cache(maxsize=65_536)
def count_clip_tokens(text: str) -> int:
    """The number of CLIP's tokens in a text, without start and end."""
    return len(_clip_tokenizer().encode(text, add_special_tokens=False).ids)


@functools.cache
def _clip_tokenizer() -> Tokenizer:
    from tokenizers import Tokenizer

    return Tokenizer.from_str((CLIP / "tokenizer.json").read_text("utf-8"))


def copy_tokenizer(kind: str, source: Path | None, target: Path) -> None:
    """Write the tokenizer of a kind of text encoder. Raises UsageError where it is neither packaged nor found."""
    if source is None and kind in LACK_TOKENIZER:
        source = _on_this_computer(kind)
        if source is None:
            encoder, known = ORIGINS[kind]
            message = f"{encoder} lacks its tokenizer, which model files do not contain."
            fix = f"Name a folder with {target.name}/tokenizer.json with model.text_encoders; {known}."
            raise UsageError(Problem("tokenizer_missing", message, fix))
    if source is not None:
        copy_small(source, target)
        return
    target.mkdir(parents=True, exist_ok=True)
    (target / "tokenizer.json").write_bytes((CLIP / "tokenizer.json").read_bytes())
    config = {
        "tokenizer_class": "CLIPTokenizer",
        "model_max_length": 77,
        "bos_token": "<|startoftext|>",
        "eos_token": END,
        "unk_token": END,
        "pad_token": FILLED_WITH.get(kind, END),
        "do_lower_case": True,
        "add_prefix_space": False,
    }
    write_json(target / "tokenizer_config.json", config)


def copy_small(source: Path, target: Path) -> None:
    """Copy configs and vocabularies of a folder: no weights, and no table of places, which would be trusted in the cache."""
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        if path.is_file() and path.name != WEIGHTS and not path.name.endswith(WEIGHTS_OF_OTHERS):
            shutil.copyfile(path, target / path.name)


def _on_this_computer(kind: str) -> Path | None:
    """A folder with the tokenizer of a kind in the user's Hugging Face cache."""
    home = Path(os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface"))
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    for name, folder in REPOSITORIES[kind]:
        snapshots = hub / f"models--{name.replace('/', '--')}" / "snapshots"
        for vocabulary in ("tokenizer.json", "merges.txt"):
            if found := sorted(snapshots.glob(f"*/{folder}/{vocabulary}")):
                return found[-1].parent
    return None
