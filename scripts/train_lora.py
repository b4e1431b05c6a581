"""Train one LoRA: `accelerate launch scripts/train_lora.py --preset 12gb`.

The same arguments as `lora-trainer train`; see `lora-trainer train --help`.
"""

from __future__ import annotations

import sys

from lora_trainer.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main(["train", *sys.argv[1:]]))
