"""`sample LORA`: pictures with and without a LoRA file, same seeds."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from lora_trainer.cli.arguments import say
from lora_trainer.config.schema import Config
from lora_trainer.core.errors import DONE, Problem, UsageError
from lora_trainer.core.findings import printable_lines
from lora_trainer.production.inputs import model_folder, read_model


def sample_command(
    lora: str | Path,
    model: str | Path | None,
    prompts: Sequence[str],
    config: Config,
    *,
    output: str | Path | None = None,
    seed: int = 0,
) -> int:
    """Draw each prompt without and with the LoRA; write the pictures, a sheet and the recipe.

    Pictures go to `output`, by default the folder `samples` beside the file, and never over
    earlier ones. Seeds count up
    from `seed`. Raises UsageError for a file or model that cannot be read.
    """
    path = Path(lora)
    if not prompts:
        raise UsageError(Problem("No prompt was given.", 'For example: --prompt "a photo of zobo".'))
    if model is not None:
        config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(model)})})
    family, facts = read_model(config)
    import torch

    from lora_trainer.evaluation.placing import with_less
    from lora_trainer.evaluation.sample import Compared, Drawing, compare, save_comparison
    from lora_trainer.models.lora_files import read_lora
    from lora_trainer.production.choices import choose_precision, computed_in, usable_bytes

    weights = read_lora(path)
    if weights.not_finite():
        raise UsageError(Problem(f"{path.name} holds NaN or infinity.", "Train it again with a lower learning rate."))
    print(printable_lines(f"base model: {model_folder(config)}"), file=sys.stderr)
    drawing = Drawing(config.sample.steps, config.sample.guidance, (facts.resolution, facts.resolution))
    seeds = [seed + index for index in range(len(prompts))]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = computed_in(choose_precision(config.memory.base_precision, device, asked=False).value, device)

    def drawn(usable: int | None) -> Compared:
        return compare(
            family,
            facts.path,
            path,
            list(prompts),
            seeds,
            drawing,
            dtype=dtype,
            device=device,
            usable=usable,
            say=say,
        )

    without, with_lora, used = with_less(drawn, usable_bytes(config, device), device, say)
    folder = Path(output) if output is not None else path.parent / "samples"
    sheet = save_comparison(folder, without, with_lora, used, name=free_name(folder, f"{path.stem}_before_after"))
    print(sheet)
    return DONE


def free_name(folder: Path, name: str) -> str:
    """The name, numbered (`name-2`) where earlier pictures have it."""
    names = (name, *(f"{name}-{number}" for number in range(2, 10_000)))
    return next(each for each in names if not (folder / f"{each}.json").exists())
