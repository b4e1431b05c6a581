"""What the judge of samples can tell: a script draws what a LoRA would, with a fault in a known share of the images.

    python scripts/judge_study.py OUT
    python scripts/judge_study.py OUT --sets pingo mosaic --real FOLDER

Each set is a drawn subject or style, or a folder of real images. Its first images are the dataset; the samples are others of the same
kind, drawn by the same script, or for real images the images themselves with slight changes. Each arm draws a fault into a share of
them and asks the judge (`lora_trainer/run/judge_folder.py`, as `validate --samples` does). OUT/rows.jsonl has a line for each verdict,
and what is printed at the end is the confusion table.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent))

from builtin_base.draw_datasets import draw_subject
from builtin_base.draw_mascot import draw_pose
from builtin_base.draw_style import draw_mosaic, draw_styled, mosaic_scene, styled_scene
from builtin_base.drawing import Scene, draw_anything
from lora_trainer.data.images.images import IMAGE_ENDINGS, load_rgb
from lora_trainer.evaluation.faults import FAULTS, blurred, noisy
from lora_trainer.evaluation.judge import Judge, Tested
from lora_trainer.evaluation.verdict import LINE
from lora_trainer.run.judge_folder import judged

DATASET, SAMPLES = 24, (12, 48)
SHARES = (0.25, 0.5, 1.0)
SIDE = 192  # pixels: more than the judge looks at
ALIKE = 240  # drawings of a subject so far apart have the same background and size
Drawn = tuple[Image.Image, str]
Plant = Callable[[Image.Image, Sequence[Image.Image], random.Random], Image.Image]


@dataclass(frozen=True)
class Set:
    """A dataset, samples that a perfect LoRA would give, two seeds of each prompt in turn, and images of other things."""

    name: str
    dataset: list[Drawn]
    perfect: list[Drawn]
    others: list[Image.Image]


def small(image: Image.Image) -> Image.Image:
    scale = SIDE / (image.width * image.height) ** 0.5
    size = round(image.width * scale), round(image.height * scale)
    return image.convert("RGB").resize(size, Image.Resampling.LANCZOS)


def set_of(name: str, draw: Callable[[int, int], Drawn]) -> Set:
    """`draw` takes the number of an image and of a variant of it: another drawing that suits the same caption; 0 is the dataset's."""
    dataset = [draw(number, 0) for number in range(DATASET)]
    perfect = [
        (
            small(draw(number // 2 % DATASET, 1 + number % 2 + 2 * (number // 2 // DATASET))[0]),
            dataset[number // 2 % DATASET][1],
        )
        for number in range(SAMPLES[-1])
    ]
    rng = random.Random(name)
    others = [draw_anything(rng, SIDE, SIDE) for _ in range(16)]
    return Set(name, [(small(image), caption) for image, caption in dataset], perfect, others)


def styled(draw: Callable[[int], Drawn], scene_of: Callable[[int], Scene]) -> Callable[[int, int], Drawn]:
    """A style's images by number and variant: others that show the same shape in the same colors."""

    def words(number: int) -> tuple[str, str, str]:
        scene = scene_of(number)
        return scene.shape, scene.color, scene.background

    like: dict[tuple[str, str, str], list[int]] = {words(number): [] for number in range(DATASET)}
    for number in range(DATASET, 6000):
        if (found := words(number)) in like:
            like[found].append(number)

    def image(number: int, variant: int) -> Drawn:
        return draw(number if variant == 0 else like[words(number)][variant - 1])

    return image


def subject(name: str) -> Callable[[int, int], Drawn]:
    return lambda number, variant: draw_subject(name, number + ALIKE * variant)


SETS: Mapping[str, Callable[[], Set]] = {
    "pomo": lambda: set_of("pomo", draw_pose),
    "zobo": lambda: set_of("zobo", subject("zobo")),
    "fungo": lambda: set_of("fungo", subject("fungo")),
    "chalk": lambda: set_of("chalk", styled(draw_styled, styled_scene)),
    # Sealed: no limit or gate was set by these.
    "pingo": lambda: set_of("pingo", subject("pingo")),
    "mosaic": lambda: set_of("mosaic", styled(draw_mosaic, mosaic_scene)),
}


def real_set(folder: Path) -> Set:
    """Real images: every second one is the dataset, and the others, which a perfect LoRA could have drawn, are its samples."""
    files = sorted(path for path in folder.iterdir() if path.suffix.lower() in IMAGE_ENDINGS)
    images = []
    for path in files:
        words = path.with_suffix(".txt")
        images.append((small(load_rgb(path)), words.read_text("utf-8").strip() if words.is_file() else ""))
    rng = random.Random(folder.name)
    return Set(folder.name, images[::2], images[1::2], [draw_anything(rng, SIDE, SIDE) for _ in range(16)])


def one_pose(image: Image.Image, others: Sequence[Image.Image], rng: random.Random) -> Image.Image:
    del image, rng
    return others[0]


def house(image: Image.Image, others: Sequence[Image.Image], rng: random.Random) -> Image.Image:
    """Something else in the subject's colors."""
    del others
    return draw_anything(rng, *image.size)


# What is drawn into the samples beside the faults that the judge is tested with, and stronger or weaker ones of these.
ARMS: Mapping[str, Plant] = {
    **{name: fault.plant for name, fault in FAULTS.items()},
    "blurred_5": blurred(5.0),
    "noisy_25": noisy(25.0),
    "something_else": house,
    "one_image": one_pose,
}


@dataclass(frozen=True)
class Row:
    """One verdict: the fault, the share of the samples that have it, and what the judge said."""

    set: str
    arm: str
    share: float
    samples: int
    outcome: str
    score: float
    claimed: bool  # the judge says that it can tell this fault
    parts: dict[str, float]


def verdict(about: Set, judge: Judge, tested: Tested, arm: str, share: float, count: int) -> Row:
    rng = random.Random(f"{about.name} {arm} {share} {count}")
    samples = about.perfect[:count]
    others = about.others
    if arm == "leak":
        faulty = rng.sample(range(len(others)), round(share * len(others)))
        others = [about.perfect[place][0] if place in faulty else image for place, image in enumerate(others)]
    elif arm != "perfect":
        dataset = [image for image, _ in about.dataset]
        faulty = rng.sample(range(len(samples)), round(share * len(samples)))
        planted = {place: copied_or_planted(arm, samples[place], about.dataset, dataset, rng) for place in faulty}
        samples = [(planted.get(place, image), caption) for place, (image, caption) in enumerate(samples)]
    drawn = [(caption, image) for image, caption in samples]
    report = judged(judge, tested, drawn, others, (LINE, "none"))
    parts = {name: part.measure.value for name, part in report.parts.items() if part.measure is not None}
    claimed = tested.tells(arm) if arm in FAULTS else True
    return Row(about.name, arm, share, len(samples), str(report.outcome), report.score or 0.0, claimed, parts)


def copied_or_planted(
    arm: str, sample: Drawn, dataset: list[Drawn], images: list[Image.Image], rng: random.Random
) -> Image.Image:
    image, caption = sample
    if arm == "copied":  # the dataset's own image of this caption
        image = next((own for own, words in dataset if words == caption), dataset[0][0])
    return ARMS[arm](image, images, rng)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--sets", nargs="*", default=["pomo", "zobo", "fungo", "chalk"], choices=list(SETS))
    parser.add_argument("--real", nargs="*", type=Path, default=[], help="folders of real images with captions")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for about in [*(SETS[name]() for name in args.sets), *(real_set(folder) for folder in args.real)]:
        judge = Judge([image for image, _ in about.dataset], [caption for _, caption in about.dataset])
        tested = judge.tested()
        print(f"{about.name}: cannot tell {', '.join(tested.cannot_tell) or 'nothing'}", flush=True)
        for count in sorted({min(count, len(about.perfect)) for count in SAMPLES}):
            rows.append(verdict(about, judge, tested, "perfect", 0.0, count))
            for arm in (*ARMS, "leak"):
                rows += [verdict(about, judge, tested, arm, share, count) for share in SHARES]
        with open(args.out / "rows.jsonl", "w", encoding="utf-8") as stream:
            stream.writelines(json.dumps(asdict(row)) + "\n" for row in rows)
    print(table(rows))


def table(rows: Sequence[Row]) -> str:
    """By fault and share: how many verdicts passed, were refused and were left open, of those where the judge claims to tell it."""
    lines = ["| fault | claimed by | samples | " + " | ".join(f"{share:.0%}" for share in SHARES) + " |"]
    lines.append("|---|---|---|" + "---|" * len(SHARES))
    for arm in ("perfect", *ARMS, "leak"):
        own = [row for row in rows if row.arm == arm]
        for count in sorted({row.samples for row in own}):
            sized = [row for row in own if row.samples == count]
            claimed = sorted({row.set for row in sized if row.claimed})
            cells = []
            for share in (0.0,) if arm == "perfect" else SHARES:
                found = Counter(row.outcome for row in sized if row.share == share and row.claimed)
                cells.append(f"{found['passed']} / {found['unresolved']} / {found['refused']}")
            lines.append(
                f"| {arm} | {len(claimed)} of {len({row.set for row in sized})} | {count} | {' | '.join(cells)} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
