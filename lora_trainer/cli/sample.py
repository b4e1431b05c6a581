"""`sample LORA`: generate a grid of images without and with a LoRA, same seeds; or repeat a recipe."""

from __future__ import annotations

import glob
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.cli.arguments import say
from lora_trainer.core.errors import DONE, Problem, UsageError
from lora_trainer.core.findings import printable_lines
from lora_trainer.data.captions import TRIGGER
from lora_trainer.run.bases.find import describe_model
from lora_trainer.run.counting import DRAWN, counting
from lora_trainer.run.inputs import check_control_images, read_model, with_absolute_paths
from lora_trainer.run.reading import read_as_trained, run_beside
from lora_trainer.run.sampling import (
    BUILT_IN,
    drawing_of,
    filled,
    parts_of,
    prefixed,
    rows_for,
    triggers_of,
    with_control_images,
)

if TYPE_CHECKING:
    import torch

    from lora_trainer.config.schema import Config
    from lora_trainer.evaluation.recipe import Drawing, ImageRequest

MOST_IMAGES = 4096


@dataclass(frozen=True)
class GridPlan:
    """The images to generate, and the precision and batch size of a recipe."""

    rows: Sequence[ImageRequest]
    drawing: Drawing
    dtype: str | None = None
    at_once: int | None = None


@dataclass(frozen=True)
class GridFolder:
    """The folder that a grid is written to, over an earlier one of its name or beside it."""

    path: Path
    overwrite: bool = False

    def name_for(self, name: str) -> str:
        """The name of the grid's files, numbered (`name-2`) if earlier images have it, even those of an unfinished grid.

        Where they are overwritten it is the same name.
        """
        if self.overwrite:
            return name
        names = (name, *(f"{name}-{number}" for number in range(2, 10_000)))
        return next(each for each in names if not _files_of(self.path, each))


def sample_command(
    lora: str | Path,
    prompts: Sequence[str],
    config: Config,
    *,
    output: GridFolder | None = None,
    seeds: Sequence[int] = (0,),
    size: tuple[int, int] | None = None,
) -> int:
    """Generate each prompt with each seed, without the LoRA and at each strength; write images, grid and recipe.

    They are written to `output` (default: the folder `samples` beside the file), over earlier ones only where it says so. Without
    `prompts` the config's are used. Raises UsageError if the file or model cannot be read or do not match.
    """
    path = Path(lora)
    prompts = list(prompts) or list(config.sample.prompts)
    if not prompts:
        raise UsageError(Problem("prompt_missing", "There is no prompt.", 'For example: --prompt "a photo of my cat".'))
    metadata = _readable(path)
    run = run_beside(path)
    config = read_as_trained(config, None if run is None else run.config, metadata)
    trigger_words = triggers_of(config, metadata)
    if not trigger_words and any(TRIGGER in prompt for prompt in prompts):
        message = f"A prompt has {TRIGGER}, but neither captions.trigger_word nor the header of {path.name} names a trigger word."
        raise UsageError(
            Problem(
                "trigger_word_missing",
                message,
                "Write the trigger word itself, or add --set captions.trigger_word=WORD.",
            )
        )
    family, facts = read_model(config)
    chosen = size or (facts.resolution, facts.resolution)

    from lora_trainer.evaluation.sample import refuse_size

    refuse_size(chosen, facts.pixel_step)
    prefix = config.sample.prompt_prefix
    rows = rows_for([prefixed(filled(prompt, trigger_words), prefix) for prompt in prompts], list(seeds))
    if config.sample.control_images:
        check_control_images(config.sample.control_images, len({row.prompt for row in rows}), facts)
        rows = with_control_images(rows, config.sample.control_images)
    drawing = drawing_of(config, family, facts, chosen)
    _refuse_many(rows, drawing)
    folder = output or GridFolder(path.parent / "samples")
    _draw(path, config, GridPlan(rows, drawing), folder, f"{path.stem}_before_after")
    return DONE


def _refuse_many(rows: Sequence[ImageRequest], drawing: Drawing) -> None:
    count = len(rows) * (1 + len(drawing.strengths))
    if count > MOST_IMAGES:
        raise UsageError(
            Problem("too_many_images", f"These are {count} images.", f"At most {MOST_IMAGES} are generated at once.")
        )


def draw_again(lora: Path, config: Config, found: dict[str, Any], output: GridFolder) -> int:
    """Generate the images of a recipe again. Raises UsageError for another LoRA than the recipe's."""
    from lora_trainer.core.io import sha256_file
    from lora_trainer.evaluation.recipe import changed_since, drawing_of_recipe, rows_of, text_of_recipe
    from lora_trainer.evaluation.sample import refuse_size

    _readable(lora)
    if sha256_file(lora) != found["lora_sha256"]:
        message = f"{lora.name} is not the recipe's {found.get('lora', 'LoRA')}: its SHA-256 differs."
        raise UsageError(
            Problem(
                "recipe_of_other_lora", message, f"Name the file whose SHA-256 begins with {found['lora_sha256'][:12]}."
            )
        )
    text, rows, drawing = text_of_recipe(found), rows_of(found), drawing_of_recipe(found)
    _refuse_many(rows, drawing)
    refuse_size(drawing.size, read_model(config)[1].pixel_step)
    grid = GridPlan(rows, drawing, found["dtype"], found.get("at_once"))
    used = _draw(lora, config, grid, output, f"{lora.stem}_again", text=text)
    if changed := changed_since(found, used):
        say(f"changed since the recipe was written: {', '.join(changed)}; the images may differ")
    return DONE


def _readable(path: Path) -> dict[str, str]:
    """The header of a LoRA file. Raises UsageError if it cannot be read or has weights that are not finite."""
    from lora_trainer.models.lora_names import read_adapter

    weights = read_adapter(path)
    if weights.not_finite():
        raise UsageError(
            Problem(
                "lora_not_finite",
                f"{path.name} contains NaN or infinity.",
                "Train it again with a lower learning rate.",
            )
        )
    return dict(weights.metadata)


def _draw(
    path: Path, config: Config, grid: GridPlan, folder: GridFolder, name: str, *, text: Any = None
) -> dict[str, Any]:
    """Generate the images, print the grid's path, and return the recipe."""
    import torch

    from lora_trainer.evaluation.compute import Compute
    from lora_trainer.evaluation.placing import with_less
    from lora_trainer.evaluation.recipe import Grid, NamedModel
    from lora_trainer.evaluation.sample import Where, compare
    from lora_trainer.run.choices import usable_bytes

    family, facts = read_model(config)
    print(printable_lines(f"base model: {describe_model(config.model)}"), file=sys.stderr)
    config = with_absolute_paths(config)  # the recipe must work from any folder
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    where = Where(folder.path, folder.name_for(name))
    family = family if text is None else family.reading(text)
    model = NamedModel(family, facts.path, config.model.path or BUILT_IN, parts_of(config))
    with counting() as count:
        usable, dtype = usable_bytes(config, device), _dtype(config, grid, device)
        compute = Compute(dtype, device, usable, grid.at_once, say, count(DRAWN))
        used = with_less(partial(compare, model, path, Grid(grid.rows, grid.drawing), where), compute)
    if folder.overwrite:  # a smaller grid leaves none of an earlier one's images between its own
        written = {where.sheet, where.recipe}
        for strength in (None, *grid.drawing.strengths):
            written |= {where.image(index, strength) for index in range(len(grid.rows))}
        for path in set(_files_of(folder.path, where.name)) - written:
            path.unlink(missing_ok=True)
    print(where.sheet)
    return used


def _dtype(config: Config, grid: GridPlan, device: torch.device) -> torch.dtype:
    import torch

    from lora_trainer.run.choices import choose_precision, computed_in

    named = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}.get(grid.dtype or "")
    return named or computed_in(choose_precision(config.memory.weight_dtype, device, is_set=False).value, device)


def _files_of(folder: Path, name: str) -> list[Path]:
    """The files of a grid: its sheet, its recipe and its images."""
    whole = [path for ending in (".json", ".png") if (path := folder / f"{name}{ending}").exists()]
    return [*whole, *folder.glob(f"{glob.escape(name)}_*.png")]
