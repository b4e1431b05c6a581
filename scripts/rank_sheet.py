"""Draw docs/ranks.png: a LoRA at several ranks, and merged with another, on the built-in base model.

python scripts/rank_sheet.py runs/zobo/zobo.safetensors runs/fungo/fungo.safetensors docs/ranks.png
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from lora_trainer.cli.main import main
from lora_trainer.core.grid import image_name
from lora_trainer.evaluation.sheet import SheetGroup, SheetRow, contact_sheet
from lora_trainer.lora_format.reading import read_lora

RANKS = (8, 4, 2, 1)
SEED = 3
COLORS = 128  # of the stored image


def drawn(lora: Path, prompts: list[str], folder: Path) -> list[list[Path]]:
    """For each prompt the image without the LoRA and with it, at strength 1."""
    out = folder / f"images of {lora.stem}"
    asked = [part for prompt in prompts for part in ("--prompt", prompt)]
    if main(["sample", str(lora), *asked, "--seed", str(SEED), "--output", str(out)]):
        raise SystemExit(f"{lora} could not be sampled")
    (recipe,) = out.glob("*.json")
    return [[out / image_name(recipe.stem, row, strength) for strength in (None, 1.0)] for row in range(len(prompts))]


def run() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("lora", "other", "sheet"):
        parser.add_argument(name, type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        whole = max(pair.rank for pair in read_lora(arguments.lora).modules.values())
        files = {f"rank {whole}": arguments.lora}
        for rank in RANKS:
            files[f"rank {rank}"] = folder / f"rank-{rank}.safetensors"
            main(["resize", str(arguments.lora), "--rank", str(rank), "--output", str(files[f"rank {rank}"])])
        both = folder / "merged.safetensors"
        main(["merge", str(arguments.lora), str(arguments.other), "--output", str(both)])
        files |= {f"{arguments.other.stem} alone": arguments.other, "both merged": both}
        prompts = [f"{word} on a blue background" for word in (arguments.lora.stem, arguments.other.stem)]
        columns = [drawn(path, prompts, folder) for path in files.values()]
        groups = []
        for place, prompt in enumerate(prompts):
            images = [columns[0][place][0], *(column[place][-1] for column in columns)]
            groups.append(SheetGroup(prompt, [SheetRow("", images)]))
        title = f"{arguments.lora.stem} at ranks {whole} to 1, and merged with {arguments.other.stem}"
        image = contact_sheet(title, f"built-in base model, seed {SEED}, strength 1", ["without", *files], groups)
        image.quantize(COLORS).save(arguments.sheet, optimize=True)


if __name__ == "__main__":
    run()
