"""Write CLIP's vocabulary as the tokenizer.json that single checkpoints get.

    python scripts/write_clip_tokenizer.py bpe_simple_vocab_16e6.txt.gz

The merges file is part of OpenAI's CLIP and of the package open_clip_torch, both under the MIT licence.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

from transformers import CLIPTokenizer

TARGET = Path(__file__).parents[1] / "lora_trainer" / "models" / "single" / "clip" / "tokenizer.json"
MERGES = 49152 - 256 - 2  # the file has more, which CLIP never used


def letters() -> list[str]:
    """A printable character for each byte: printable bytes come first and map to themselves."""
    printing = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printing]
    return [*map(chr, printing), *(chr(256 + number) for number in range(len(others)))]


def write_tokenizer(source: Path, target: Path) -> None:
    """`source` has one merge a line, after a first line of its own."""
    lines = gzip.decompress(source.read_bytes()).decode("utf-8").split("\n")[1 : 1 + MERGES]
    merges = [(first, second) for first, second in (line.split() for line in lines)]
    tokens = [*letters(), *(f"{letter}</w>" for letter in letters()), *(first + second for first, second in merges)]
    tokens += ["<|startoftext|>", "<|endoftext|>"]
    tokenizer = CLIPTokenizer(vocab={token: number for number, token in enumerate(tokens)}, merges=merges)
    target.parent.mkdir(parents=True, exist_ok=True)
    document = json.loads(tokenizer.backend_tokenizer.to_str())
    target.write_text(json.dumps(document, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")
    print(f"{target}: {len(tokens)} tokens, {target.stat().st_size} bytes")


if __name__ == "__main__":
    write_tokenizer(Path(sys.argv[1]), TARGET)
