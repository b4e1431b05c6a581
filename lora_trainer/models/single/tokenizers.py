"""Tokenizers for checkpoints, which hold none: CLIP's comes with the package, others from this computer."""

from __future__ import annotations

import functools
import itertools
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.families import families
from lora_trainer.core.io import write_json
from lora_trainer.models.places import WEIGHTS
from lora_trainer.models.single.texts import title_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CLIP = files("lora_trainer.models.single") / "clip"
END, FIRST = (
    "<|endoftext|>",
    "!",
)  # padding of short captions; OpenCLIP's models were trained with the latter
FILLED_WITH = {"open_clip_h": FIRST, "open_clip_g": FIRST, "clip_g": FIRST}
WEIGHTS_OF_OTHERS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".msgpack", ".h5", ".onnx", ".index.json")


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


def origins(kind: str) -> dict[str, list[tuple[str, str]]]:
    """The models of a hub, and the folder in each, with the tokenizer of a kind, by what people call their family.

    Nothing for CLIP's, which comes with the package.
    """
    found = {}
    for document in families().values():
        if listed := document.get("single_file", {}).get("tokenizers_of_hub", {}).get(kind):
            found[document["title"]] = [(name, folder) for name, folder in listed]
    return found


def copy_tokenizer(kind: str, source: Path | None, target: Path) -> None:
    """Write the tokenizer of a kind of text encoder. Raises UsageError where it is neither packaged nor found."""
    if source is None and (known := origins(kind)):
        source = _on_this_computer(known)
        if source is None:
            message = f"{title_of(kind)} lacks its tokenizer, which model files do not contain."
            fix = f"Name a folder with {target.name}/tokenizer.json with model.text_encoders; any {' or '.join(known)} folder has one."
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


def _on_this_computer(known: Mapping[str, Sequence[tuple[str, str]]]) -> Path | None:
    """A folder with such a tokenizer in the user's Hugging Face cache; `known` as of `origins`."""
    home = Path(os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface"))
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    for name, folder in itertools.chain(*known.values()):
        snapshots = hub / f"models--{name.replace('/', '--')}" / "snapshots"
        for vocabulary in ("tokenizer.json", "merges.txt"):
            if found := sorted(snapshots.glob(f"*/{folder}/{vocabulary}")):
                return found[-1].parent
    return None
