"""What the judge of samples can tell: a script draws what a LoRA would, with a fault in a known share of the images.

    python scripts/judge_study.py OUT
    python scripts/judge_study.py OUT --sets pingo mosaic --images 12 --real FOLDER
    python scripts/judge_study.py OUT --coverage

Each set is a drawn subject or style, or a folder of real images. Its first images are the dataset; the samples are others of the same
kind, drawn by the same script, or for real images the images themselves with slight changes. Each arm draws a fault into a share of
them and asks the judge (`lora_trainer/run/judge_folder.py`, as `validate --samples` does). OUT/rows.jsonl has a line for each verdict,
and what is printed at the end is the confusion table.

With --coverage each set is drawn several times as a dataset, half of the samples of a large pool are faulty, and what is printed is
how often the interval of a part, counted in a few of them beside one of the datasets, has the rate inside that the whole pool has
beside all datasets.
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

from PIL import Image, ImageChops

sys.path.insert(0, str(Path(__file__).resolve().parent))

from builtin_base.draw_datasets import draw_subject
from builtin_base.draw_mascot import POSES, draw_pose
from builtin_base.draw_style import draw_mosaic, draw_styled, mosaic_scene, styled_scene
from builtin_base.drawing import Scene, draw_anything
from lora_trainer.data.images.images import IMAGE_ENDINGS, load_rgb
from lora_trainer.evaluation.faults import FAULTS, blurred, noisy
from lora_trainer.evaluation.judge import Judge, Tested
from lora_trainer.evaluation.looks import look_at
from lora_trainer.evaluation.sample_rates import DrawnSample, subject_parts
from lora_trainer.evaluation.verdict import LINE
from lora_trainer.run.judge_folder import judged

DATASET, SAMPLES = 24, (12, 48)
DATASETS, POOL, SUBSETS = 8, 192, 40  # of each set, for the coverage of intervals
SHARES = (0.25, 0.5, 1.0)
MOST_IMAGES = 48  # of a dataset
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


def set_of(
    name: str, draw: Callable[[int, int], Drawn], images: int = DATASET, first: int = 0, samples: int = SAMPLES[-1]
) -> Set:
    """`draw` takes the number of an image and of a variant of it: another drawing that suits the same caption. `first` is the variant
    that the dataset is drawn in; the samples are later ones."""
    dataset = [draw(number, first) for number in range(images)]
    perfect = [
        (
            small(draw(number // 2 % images, 1 + number % 2 + 2 * (number // 2 // images))[0]),
            dataset[number // 2 % images][1],
        )
        for number in range(samples)
    ]
    rng = random.Random(name)
    others = [draw_anything(rng, SIDE, SIDE) for _ in range(16)]
    return Set(name, [(small(image), caption) for image, caption in dataset], perfect, others)


def styled(draw: Callable[[int], Drawn], scene_of: Callable[[int], Scene]) -> Callable[[int, int], Drawn]:
    """A style's images by number and variant: others that show the same shape in the same colors."""

    def words(number: int) -> tuple[str, str, str]:
        scene = scene_of(number)
        return scene.shape, scene.color, scene.background

    like: dict[tuple[str, str, str], list[int]] = {words(number): [] for number in range(MOST_IMAGES)}
    for number in range(MOST_IMAGES, 20_000):
        if (found := words(number)) in like:
            like[found].append(number)

    def image(number: int, variant: int) -> Drawn:
        return draw(number if variant == 0 else like[words(number)][variant - 1])

    return image


def subject(name: str) -> Callable[[int, int], Drawn]:
    return lambda number, variant: draw_subject(name, number + ALIKE * variant)


def pose(number: int, variant: int) -> Drawn:
    """Pomo has 24 poses: a larger dataset has some of them twice, drawn differently."""
    return draw_pose(number % len(POSES), variant + 100 * (number // len(POSES)))


SETS: Mapping[str, Callable[[int, int], Drawn]] = {
    "pomo": pose,
    "zobo": subject("zobo"),
    "fungo": subject("fungo"),
    "chalk": styled(draw_styled, styled_scene),
    # Sealed: no limit or gate was set by these.
    "pingo": subject("pingo"),
    "mosaic": styled(draw_mosaic, mosaic_scene),
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


def recolored(image: Image.Image, others: Sequence[Image.Image], rng: random.Random) -> Image.Image:
    """Another one of its kind: the same forms in other colors, in front of the same background."""
    del others, rng
    hue, saturation, value = image.convert("HSV").split()
    turned = hue.point(lambda level: (level + 80) % 256)
    other = Image.merge("HSV", (turned, saturation, value)).convert("RGB")
    corner = Image.new("RGB", image.size, image.getpixel((2, 2)))
    apart = ImageChops.difference(image, corner).convert("L").point(lambda level: 255 if level > 40 else 0)
    return Image.composite(other, image, apart)


def house(image: Image.Image, others: Sequence[Image.Image], rng: random.Random) -> Image.Image:
    """Something else in the subject's colors."""
    del others
    return draw_anything(rng, *image.size)


# What is drawn into the samples beside the faults that the judge is tested with, and stronger or weaker ones of these.
ARMS: Mapping[str, Plant] = {
    **{name: fault.plant for name, fault in FAULTS.items()},
    "blurred_5": blurred(5.0),
    "noisy_25": noisy(25.0),
    "recolored": recolored,
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
    parser.add_argument("--images", type=int, default=DATASET, help=f"of a drawn dataset, up to {MOST_IMAGES}")
    parser.add_argument("--coverage", action="store_true")
    parser.add_argument("--real", nargs="*", type=Path, default=[], help="folders of real images with captions")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.coverage:
        for name in args.sets:
            print(name, json.dumps(coverage(name, args.images)), flush=True)
        return
    rows: list[Row] = []
    for about in [
        *(set_of(name, SETS[name], args.images) for name in args.sets),
        *(real_set(folder) for folder in args.real),
    ]:
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


def coverage(name: str, images: int) -> dict[str, dict[str, float]]:
    """By part and number of samples, the share of the intervals that have the pool's rate beside all datasets inside.

    Half of the pool is melted. An interval is of one look, as of images that another program drew.
    """
    about = set_of(name, SETS[name], images, samples=POOL)
    rng = random.Random(name)
    dataset = [image for image, _ in about.dataset]
    melt = FAULTS["melted"].plant
    drawn = [
        (melt(image, dataset, rng) if number % 4 > 1 else image, text)
        for number, (image, text) in enumerate(about.perfect)
    ]
    prompts = list(dict.fromkeys(text for _, text in drawn))
    samples = [
        DrawnSample(text, prompts.index(text), number, look_at(image)) for number, (image, text) in enumerate(drawn)
    ]
    subsets = {
        count: [sorted(rng.sample(range(0, POOL, 2), count // 2)) for _ in range(SUBSETS)] for count in SAMPLES
    }  # of pairs of seeds
    rates: dict[str, list[float]] = {}
    intervals: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for number in range(DATASETS):
        other = about if number == 0 else set_of(name, SETS[name], images, 20 + number, samples=2)
        judge = Judge([image for image, _ in other.dataset], [text for _, text in other.dataset])
        tested = judge.tested()
        for part, found in subject_parts(judge, tested, samples).items():
            if found.measure is not None:
                rates.setdefault(part, []).append(found.measure.value)
        for count, places in subsets.items():
            for chosen in places:
                own = [samples[place + seed] for place in chosen for seed in (0, 1)]
                for part, found in subject_parts(judge, tested, own).items():
                    if found.measure is not None:
                        intervals.setdefault((part, count), []).append((found.measure.low, found.measure.high))
    covered: dict[str, dict[str, float]] = {}
    for (part, count), found_intervals in sorted(intervals.items()):
        truth = sum(rates[part]) / len(rates[part])
        inside = sum(low <= truth <= high for low, high in found_intervals)
        covered.setdefault(part, {"rate": round(truth, 3), "least": min(rates[part]), "most": max(rates[part])})
        covered[part][f"of {count}"] = round(inside / len(found_intervals), 3)
    return covered


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
