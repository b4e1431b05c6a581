"""Which images the page shows: before and after, those behind the verdict, and each prompt through the steps."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from lora_trainer.report.ending import released_step
from lora_trainer.report.read import Image, RunReport, images_of, mapping, number, sequence, text, whole

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from lora_trainer.report.verdict_parts import PartInterval

COMPARED_RECIPE = re.compile(r"compared(?:-step-(\d+))?\.json")  # of images with each candidate
MOST_PAIRS = 12
MOST_ROWS = 8
MOST_STEPS = 8
FIRST_PAIRS = 2  # beside the verdict
WITH, WITHOUT = "with the LoRA", "without"
Asked = tuple[str, int]  # prompt and seed
Column = TypeVar("Column")


@dataclass(frozen=True)
class ImagePair:
    """Images that are shown side by side, each with what it is; None for one that was not kept. `about` is under them."""

    prompt: str
    seed: int
    sides: tuple[tuple[str, Path | None], ...]
    about: str = ""


@dataclass(frozen=True)
class ShownGroup:
    """Images that show one part of the verdict. `heading` says what they are, `about` how to read them."""

    kind: str
    heading: str
    about: str
    pairs: tuple[ImagePair, ...]


@dataclass(frozen=True)
class SheetOfPrompt:
    """One prompt and seed: an image for each column of the sheet, None where there is none."""

    prompt: str
    seed: int
    images: tuple[Path | None, ...]


@dataclass(frozen=True)
class StepSheet:
    """Prompts by steps: from the base model to the exported LoRA."""

    columns: tuple[str, ...]
    rows: tuple[SheetOfPrompt, ...]


NO_SHEET = StepSheet((), ())


@dataclass(frozen=True)
class Gallery:
    """All images of the page. `first` are beside the verdict.

    `at_end`: the pairs are the finished LoRA's. `hidden` counts those beyond the page's limit.
    """

    first: tuple[ShownGroup, ...]
    pairs: tuple[ImagePair, ...]
    evidence: tuple[ShownGroup, ...]
    sheet: StepSheet
    candidates: StepSheet
    at_end: bool
    hidden: int

    @property
    def paths(self) -> list[Path]:
        """All of them, in the order of the page."""
        pairs = [*self.pairs, *(pair for group in (*self.first, *self.evidence) for pair in group.pairs)]
        paths = [path for pair in pairs for _, path in pair.sides]
        paths += [path for row in (*self.sheet.rows, *self.candidates.rows) for path in row.images]
        return [path for path in paths if path]


@dataclass(frozen=True)
class KindOfSample:
    """Samples that the verdict kept: a heading, how to read them, and the part of the verdict that they show."""

    heading: str
    about: str
    shows: str


KINDS: Mapping[str, KindOfSample] = {
    "trigger": KindOfSample(
        "What the trigger word does",
        "One caption and seed: the base model, the LoRA without its trigger word, and the LoRA with it.",
        "",
    ),
    "scene": KindOfSample(
        "New scenes",
        "The trigger word in words that no caption has. They are to look at, and not counted.",
        "",
    ),
    "copied": KindOfSample(
        "Could these be copies?",
        "The sample that is nearest to an image of the dataset, next to the image that is most like it.",
        "is_new",
    ),
    "odd": KindOfSample(
        "The worst samples",
        "With the most faults, and least like the dataset, next to the image that is most like them. Look for a wrong subject,"
        " distortion or noise.",
        "shows",
    ),
    "unrelated": KindOfSample(
        "Prompts about other things",
        "Nothing to do with the dataset; with the LoRA these are most like it. It should not turn them into its subject.",
        "stays_away",
    ),
    "typical": KindOfSample(
        "Typical samples",
        "Of the dataset's captions, neither the best nor the worst.",
        "follows_captions",
    ),
}


def gallery_of(run: RunReport, parts: Sequence[PartInterval]) -> Gallery:
    """The images of the page: two beside the verdict, the other pairs, those that show its parts, and sheets."""
    moments = {image.step for image in run.images}
    last = None  # the newest step with images, where there are none of the end
    if None not in moments:
        last = max((image.step or 0 for image in run.images), default=None)
    pairs = pairs_of([image for image in run.images if image.step == last])

    # What did not pass comes first: refused parts before undecided ones, the worst at the top.
    not_passed = [part for part in parts if part.outcome in ("refused", "unresolved")]
    not_passed.sort(key=lambda part: (part.outcome != "refused", part.value or 0.0))
    failing = [kind for part in not_passed for kind, about in KINDS.items() if about.shows == part.name]
    evidence = {group.kind: group for group in evidence_of(run)}
    evidence = {kind: evidence[kind] for kind in (*failing, *evidence) if kind in evidence}

    # Beside the verdict: the images of the worst part, else what the trigger word does, else pairs, else any sample.
    wanted = [*failing[:1], "trigger"]
    if not pairs:
        wanted += ["typical", *evidence]
    first: list[ShownGroup] = []
    for kind in wanted:
        if kind in evidence:
            group = evidence[kind]
            first.append(replace(group, pairs=group.pairs[:FIRST_PAIRS]))
            evidence[kind] = replace(group, pairs=group.pairs[FIRST_PAIRS:])
            break
    places = FIRST_PAIRS - sum(len(group.pairs) for group in first)
    if places and pairs:
        heading = "Without and with the LoRA" if last is None else f"While training, at step {last:,}"
        first.append(ShownGroup("before_after", heading, "", tuple(pairs[:places])))
        pairs = pairs[places:]

    return Gallery(
        tuple(first),
        tuple(pairs[:MOST_PAIRS]),
        tuple(group for group in evidence.values() if group.pairs),
        sheet_of(run) if len(moments) > 1 else NO_SHEET,
        candidates_sheet(run),
        at_end=last is None,
        hidden=max(0, len(pairs) - MOST_PAIRS),
    )


def pairs_of(images: list[Image]) -> list[ImagePair]:
    """Each prompt and seed without the LoRA, and with it at each strength that one of the images has."""
    by_prompt: dict[tuple[str, int], dict[float | None, Path]] = {}
    for image in images:
        by_prompt.setdefault((image.prompt, image.seed), {})[image.strength] = image.path
    strengths = dict.fromkeys(image.strength for image in images if image.strength is not None)
    titles: dict[float | None, str] = {None: WITHOUT, 1.0: WITH}
    if strengths.keys() - {1.0}:
        titles = {None: WITHOUT} | {strength: f"{WITH} at {strength:g}" for strength in strengths}
    return [
        ImagePair(prompt, seed, tuple((title, paths.get(strength)) for strength, title in titles.items()))
        for (prompt, seed), paths in by_prompt.items()
    ]


def evidence_of(run: RunReport) -> list[ShownGroup]:
    """The samples that the verdict kept, by kind."""
    rows, groups = list(map(mapping, sequence(run.record.lora.get("images")))), []
    for kind, about in KINDS.items():
        pairs = [shown_pair(run, row) for row in rows if row.get("kind") == kind]
        kept = tuple(pair for pair in pairs if any(path for _, path in pair.sides))
        if kept:
            groups.append(ShownGroup(kind, about.heading, about.about, kept))
    return groups


def shown_pair(run: RunReport, row: Mapping[str, Any]) -> ImagePair:
    """A sample of the verdict: next to the base model's, or to the nearest image of the dataset."""
    nearest, ratio = re.split(r"[/\\]", text(row.get("nearest_path")))[-1], number(row.get("ratio"))
    if row.get("untriggered"):
        sides = [("base", "base"), ("LoRA, no trigger word", "untriggered"), ("LoRA", "lora")]
    elif row.get("base"):
        sides = [(WITHOUT, "base"), (WITH, "lora")]
    elif row.get("nearest"):
        sides = [(WITH, "lora"), (f"dataset: {nearest}", "nearest")]
    else:
        sides = [(WITH, "lora")]
    about = ""
    if ratio is not None:
        about = f"{ratio:.2f} times as unlike the dataset as its images are to each other"
        if row.get("base") and nearest:
            about += f"; most like {nearest}"
    files = tuple((title, kept_file(run, row, key)) for title, key in sides)
    return ImagePair(text(row.get("prompt")), whole(row.get("seed")) or 0, files, about)


def kept_file(run: RunReport, row: Mapping[str, Any], key: str) -> Path | None:
    """A file that the record names, inside of the run's folder."""
    name = text(row.get(key)).replace("\0", "")  # no path has one
    path = run.folder / name
    is_inside = path.resolve().is_relative_to(run.folder.resolve())
    return path if is_inside and path.is_file() else None


def sheet_of(run: RunReport) -> StepSheet:
    """Each prompt and seed without the LoRA, then at every step; the exported LoRA's images are those of its step."""
    strength, exported = strength_to_show(run.images), released_step(run)
    last = exported or run.steps
    base, drawn = arrange(
        (image, last if image.step is None else image.step)
        for image in run.images
        if image.strength in (None, strength)
    )
    several = {asked: paths for asked, paths in drawn.items() if len(paths) > 1}
    steps = choose_steps(sorted({step for paths in drawn.values() for step in paths}), last)
    titles = {step: f"step {step:,}" for step in steps}
    if exported is not None and last in titles:
        titles[last] += ", exported"
    return make_sheet(titles, base, several)


def candidates_sheet(run: RunReport) -> StepSheet:
    """The same prompts with each of the steps and strengths that `lora.choice` compared, from the recipes that it lists.

    Others in the folder are of an earlier comparison, or of one by `validate`.
    """
    choice = mapping(run.record.lora.get("choice"))
    names = [COMPARED_RECIPE.fullmatch(text(name)) for name in sequence(choice.get("recipes"))]
    recipes = [match for match in names if match]
    rows = list(map(mapping, sequence(choice.get("candidates"))))
    compared = {(whole(row.get("step")), number(row.get("strength"))) for row in rows}
    if len(recipes) <= 1:  # of the exported file alone
        compared = {(None, strength) for _, strength in compared}
    images: list[Image] = []
    for recipe in recipes:
        images += images_of(run.folder / "samples" / recipe[0], int(recipe[1]) if recipe[1] else None)
    base, drawn = arrange(
        (image, (image.step or 0, image.strength or 0.0))
        for image in images
        if image.strength is None or (image.step, image.strength) in compared
    )
    columns = sorted({column for paths in drawn.values() for column in paths})
    has_several_steps = len({step for step, _ in columns}) > 1
    titles = {}
    for step, strength in columns:
        if not has_several_steps:
            titles[step, strength] = f"strength {strength:g}"
        elif strength == 1:
            titles[step, strength] = f"step {step:,}"
        else:
            titles[step, strength] = f"step {step:,}, strength {strength:g}"
    return make_sheet(titles, base, drawn)


def compared_images(runs: Sequence[RunReport], names: Sequence[str]) -> StepSheet:
    """The same prompts and seeds at the end of several runs, first without a LoRA where all have one base model."""
    strength = strength_to_show([image for run in runs for image in run.images])
    by_prompt: dict[
        tuple[str, int], dict[int | None, Path]
    ] = {}  # images of each run by its number, None without a LoRA
    for index, run in enumerate(runs):
        for image in run.images:
            if image.step is None and image.strength in (None, strength):
                column = None if image.strength is None else index
                by_prompt.setdefault((image.prompt, image.seed), {}).setdefault(column, image.path)
    titles: dict[int | None, str] = dict(enumerate(names))
    if len({run.record.model.get("sha256") for run in runs}) == 1:
        titles = {None: WITHOUT, **titles}
    # Prompts that most runs have first.
    asked = sorted(by_prompt, key=lambda each: -len(by_prompt[each]))[:MOST_ROWS]
    rows = [SheetOfPrompt(*each, tuple(by_prompt[each].get(column) for column in titles)) for each in asked]
    return StepSheet(tuple(titles.values()), tuple(rows))


def strength_to_show(images: Sequence[Image]) -> float | None:
    """Full strength, else the strongest; None where no image has a LoRA."""
    strengths = {image.strength for image in images if image.strength is not None}
    return 1.0 if 1.0 in strengths else max(strengths, default=None)


def arrange(images: Iterable[tuple[Image, Column]]) -> tuple[dict[Asked, Path], dict[Asked, dict[Column, Path]]]:
    """Images with the columns that they belong to: those without a LoRA by prompt and seed, and the others also by column."""
    base: dict[Asked, Path] = {}
    drawn: dict[Asked, dict[Column, Path]] = {}
    for image, column in images:
        if image.strength is None:
            base.setdefault((image.prompt, image.seed), image.path)
        else:
            drawn.setdefault((image.prompt, image.seed), {})[column] = image.path
    return base, drawn


def make_sheet(
    titles: Mapping[Column, str], base: Mapping[Asked, Path], drawn: Mapping[Asked, Mapping[Column, Path]]
) -> StepSheet:
    """A sheet of what `arrange` found, with the columns of `titles`."""
    rows = [
        SheetOfPrompt(*asked, (base.get(asked), *(paths.get(column) for column in titles)))
        for asked, paths in drawn.items()
    ]
    return StepSheet((WITHOUT, *titles.values()), tuple(rows[:MOST_ROWS])) if rows else NO_SHEET


def choose_steps(steps: list[int], released: int) -> list[int]:
    """At most MOST_STEPS, evenly, first and last and the exported one among them."""
    if len(steps) <= MOST_STEPS:
        return steps
    places = {round(index * (len(steps) - 1) / (MOST_STEPS - 1)) for index in range(MOST_STEPS)}
    kept = {steps[place] for place in places}
    if released in steps and released not in kept:
        kept.remove(min(kept - {steps[0], steps[-1]}, key=lambda step: abs(step - released)))
        kept.add(released)
    return sorted(kept)
