"""Which images the page shows: before and after, those behind the verdict, and each prompt through the steps."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lora_trainer.report.ending import released_step
from lora_trainer.report.read import Image, RunReport, images_of, mapping, number, sequence, text, whole

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from lora_trainer.report.verdict_parts import PartInterval

COMPARED_RECIPE = re.compile(r"compared(?:-step-(\d+))?\.json")  # of images with each candidate
MOST_PAIRS = 12
MOST_ROWS = 8
MOST_STEPS = 8
FIRST_PAIRS = 2  # beside the verdict
WITH, WITHOUT = "with the LoRA", "without"


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
        every = [*self.pairs, *(pair for each in (*self.first, *self.evidence) for pair in each.pairs)]
        found = [path for pair in every for _, path in pair.sides]
        found += [path for row in (*self.sheet.rows, *self.candidates.rows) for path in row.images]
        return [path for path in found if path]


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
    last = None if None in moments else max((step for step in moments if step is not None), default=None)
    pairs = pairs_of([image for image in run.images if image.step == last])
    # What did not pass comes first: refused parts before undecided ones, the worst at the top.
    undecided = [part for part in parts if part.outcome in ("refused", "unresolved")]
    undecided.sort(key=lambda part: (part.outcome != "refused", part.value or 0.0))
    failing = [kind for part in undecided for kind, about in KINDS.items() if about.shows == part.name]
    evidence = sorted(
        evidence_of(run), key=lambda group: failing.index(group.kind) if group.kind in failing else len(failing)
    )
    first: list[ShownGroup] = []
    if (shown := shown_first(evidence, failing, has_pairs=bool(pairs))) is not None:
        first.append(replace(shown, pairs=shown.pairs[:FIRST_PAIRS]))
        evidence = [replace(each, pairs=each.pairs[FIRST_PAIRS:]) if each is shown else each for each in evidence]
    room = FIRST_PAIRS - sum(len(group.pairs) for group in first)
    if room and pairs:
        heading = "Without and with the LoRA" if last is None else f"While training, at step {last:,}"
        first.append(ShownGroup("before_after", heading, "", tuple(pairs[:room])))
        pairs = pairs[room:]
    return Gallery(
        tuple(first),
        tuple(pairs[:MOST_PAIRS]),
        tuple(group for group in evidence if group.pairs),
        sheet_of(run) if len(moments) > 1 else NO_SHEET,
        candidates_sheet(run),
        at_end=last is None,
        hidden=max(0, len(pairs) - MOST_PAIRS),
    )


def shown_first(evidence: Sequence[ShownGroup], failing: Sequence[str], *, has_pairs: bool) -> ShownGroup | None:
    """The group beside the verdict: the images of the worst part, else what the trigger word does, else the pairs, else typical ones."""
    by_kind = {group.kind: group for group in evidence}
    wanted = [*failing[:1], "trigger"]
    if not has_pairs:
        wanted += ["typical", *by_kind]
    return next((by_kind[kind] for kind in wanted if kind in by_kind), None)


def pairs_of(images: list[Image]) -> list[ImagePair]:
    drawn: dict[tuple[str, int], dict[float | None, Path]] = {}
    for image in images:
        drawn.setdefault((image.prompt, image.seed), {})[image.strength] = image.path
    strengths = list(dict.fromkeys(each for found in drawn.values() for each in found if each is not None)) or [1.0]
    return [
        ImagePair(prompt, seed, tuple((side_name(each, strengths), found.get(each)) for each in (None, *strengths)))
        for (prompt, seed), found in drawn.items()
    ]


def side_name(strength: float | None, strengths: list[float]) -> str:
    if strength is None:
        return WITHOUT
    return WITH if strengths == [1.0] else f"{WITH} at {strength:g}"


def evidence_of(run: RunReport) -> list[ShownGroup]:
    """The samples that the verdict kept, by kind."""
    rows = list(map(mapping, sequence(run.record.lora.get("images"))))
    found = []
    for kind, each in KINDS.items():
        pairs = [shown_pair(run, row) for row in rows if row.get("kind") == kind]
        if pairs := [pair for pair in pairs if any(path for _, path in pair.sides)]:
            found.append(ShownGroup(kind, each.heading, each.about, tuple(pairs)))
    return found


def shown_pair(run: RunReport, row: Mapping[str, Any]) -> ImagePair:
    """A sample of the verdict: next to the base model's, or to the nearest image of the dataset."""
    named = re.split(r"[/\\]", text(row.get("nearest_path")))[-1]
    sides = [(WITH, kept_file(run, row, "lora"))]
    if row.get("untriggered"):
        sides = [
            ("base", kept_file(run, row, "base")),
            ("LoRA, no trigger word", kept_file(run, row, "untriggered")),
            ("LoRA", kept_file(run, row, "lora")),
        ]
    elif row.get("base"):
        sides.insert(0, (WITHOUT, kept_file(run, row, "base")))
    elif row.get("nearest"):
        sides.append((f"dataset: {named}", kept_file(run, row, "nearest")))
    ratio, about = number(row.get("ratio")), ""
    if ratio is not None:
        about = f"{ratio:.2f} times as unlike the dataset as its images are to each other"
        about += f"; most like {named}" if row.get("base") and named else ""
    return ImagePair(text(row.get("prompt")), whole(row.get("seed")) or 0, tuple(sides), about)


def kept_file(run: RunReport, row: Mapping[str, Any], what: str) -> Path | None:
    """A file that the record names, inside of the run's folder."""
    name = text(row.get(what)).replace("\0", "")  # no path has one
    path = run.folder / name
    is_inside = name and path.resolve().is_relative_to(run.folder.resolve())
    return path if is_inside and path.is_file() else None


def sheet_of(run: RunReport) -> StepSheet:
    """Each prompt and seed without the LoRA, then at every step; the exported LoRA's images are those of its step."""
    # The sheet shows full strength, else the strongest.
    strengths = {image.strength for image in run.images if image.strength is not None}
    strength = 1.0 if 1.0 in strengths else max(strengths, default=None)
    released = released_step(run) or run.steps
    base: dict[tuple[str, int], Path] = {}
    drawn: dict[tuple[str, int], dict[int, Path]] = {}
    for image in run.images:
        asked = (image.prompt, image.seed)
        if image.strength is None:
            base.setdefault(asked, image.path)
        elif image.strength == strength:
            drawn.setdefault(asked, {})[released if image.step is None else image.step] = image.path
    steps = chosen(sorted({step for found in drawn.values() for step in found}), released)
    rows = [
        SheetOfPrompt(prompt, seed, (base.get((prompt, seed)), *(found.get(step) for step in steps)))
        for (prompt, seed), found in drawn.items()
        if len(found) > 1
    ]
    is_exported = released_step(run) is not None
    names = [f"step {step:,}{', exported' if is_exported and step == released else ''}" for step in steps]
    return StepSheet((WITHOUT, *names), tuple(rows[:MOST_ROWS])) if rows else NO_SHEET


def candidates_sheet(run: RunReport) -> StepSheet:
    """The same prompts with each of the steps and strengths that `lora.choice` compared, from the recipes that it lists.

    Others in the folder are of an earlier comparison, or of one by `validate`.
    """
    choice = mapping(run.record.lora.get("choice"))
    recipes = [found for name in sequence(choice.get("recipes")) if (found := COMPARED_RECIPE.fullmatch(text(name)))]
    compared = {
        (whole(row.get("step")) if len(recipes) > 1 else None, number(row.get("strength")))
        for row in map(mapping, sequence(choice.get("candidates")))
    }
    base: dict[tuple[str, int], Path] = {}
    drawn: dict[tuple[str, int], dict[tuple[int, float], Path]] = {}
    for recipe in recipes:
        for image in images_of(run.folder / "samples" / recipe[0], int(recipe[1]) if recipe[1] else None):
            asked = (image.prompt, image.seed)
            if image.strength is None:
                base.setdefault(asked, image.path)
            elif (image.step, image.strength) in compared:
                drawn.setdefault(asked, {})[image.step or 0, image.strength] = image.path
    columns = sorted({key for found in drawn.values() for key in found})
    several = len({step for step, _ in columns}) > 1
    names = [
        f"step {step:,}{'' if strength == 1 else f', strength {strength:g}'}" if several else f"strength {strength:g}"
        for step, strength in columns
    ]
    rows = [
        SheetOfPrompt(prompt, seed, (base.get((prompt, seed)), *(found.get(column) for column in columns)))
        for (prompt, seed), found in drawn.items()
    ]
    return StepSheet((WITHOUT, *names), tuple(rows[:MOST_ROWS])) if rows else NO_SHEET


def compared_images(runs: Sequence[RunReport], names: Sequence[str]) -> StepSheet:
    """The same prompts and seeds at the end of several runs, first without a LoRA where all have one base model."""
    strengths = {image.strength for run in runs for image in run.images if image.strength is not None}
    strength = 1.0 if 1.0 in strengths else max(strengths, default=None)
    found: dict[tuple[str, int], dict[int | None, Path]] = {}
    for index, run in enumerate(runs):
        for image in run.images:
            if image.step is None and image.strength in (None, strength):
                place = None if image.strength is None else index
                found.setdefault((image.prompt, image.seed), {}).setdefault(place, image.path)
    is_one_base = len({run.record.model.get("sha256") for run in runs}) == 1
    columns: list[int | None] = [*([None] if is_one_base else []), *range(len(runs))]
    # Prompts that most runs have first.
    asked = sorted(found, key=lambda each: -len(found[each]))[:MOST_ROWS]
    rows = [
        SheetOfPrompt(prompt, seed, tuple(found[prompt, seed].get(column) for column in columns))
        for prompt, seed in asked
    ]
    return StepSheet(tuple(WITHOUT if column is None else names[column] for column in columns), tuple(rows))


def chosen(steps: list[int], released: int) -> list[int]:
    """At most MOST_STEPS, evenly, first and last and the exported one among them."""
    if len(steps) <= MOST_STEPS:
        return steps
    places = {round(index * (len(steps) - 1) / (MOST_STEPS - 1)) for index in range(MOST_STEPS)}
    kept = {steps[place] for place in places}
    if released in steps and released not in kept:
        kept.remove(min(kept - {steps[0], steps[-1]}, key=lambda step: abs(step - released)))
        kept.add(released)
    return sorted(kept)
