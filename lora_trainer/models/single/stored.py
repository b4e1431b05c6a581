"""The tensors of one part of a checkpoint, and renaming from the original layout to diffusers."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.tensorfile import METADATA, is_gguf
from lora_trainer.models.folder import UNQUANTISED, how_quantized
from lora_trainer.models.places import Place, Scaled
from lora_trainer.models.single.scaled import scaled_weights

if TYPE_CHECKING:
    from lora_trainer.lora_format.layouts import Layout, Rule

NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)")
COUNTED = re.compile(r"\d{1,3}(?=\.)", re.ASCII)  # no model has a thousand layers
FORMS_SHOWN = {"F8_E4M3": "fp8 e4m3", "F8_E5M2": "fp8 e5m2", "I8": "int8", "BF16": "bf16", "F16": "fp16", "F32": "fp32"}
SHOWN = 3  # names in a message
TITLE = "modelspec.title"
LONGEST_TITLE = 200  # characters that are read
USE_BASE = "Name a base model with --model: a checkpoint, a folder in diffusers' layout or a hub id."


@dataclass(frozen=True)
class Stored:
    """Shapes of a part's tensors by their names without the part's `prefix`; `types` of those that are stored as they are,
    and how others are dequantized (`scaled`). `unread`: why some have a form that is not read.
    """

    file: Path
    prefix: str
    shapes: Mapping[str, tuple[int, ...]]
    types: Mapping[str, str] = field(default_factory=dict)
    scaled: Mapping[str, Scaled] = field(default_factory=dict)
    unread: str = ""

    @classmethod
    def of(cls, file: Path, header: Mapping[str, Any], prefix: str) -> Stored:
        """The tensors whose names begin with the prefix, without those that only scale others."""
        found = scaled_weights(file, header, prefix)
        own = {
            name.removeprefix(prefix): entry
            for name, entry in header.items()
            if name.startswith(prefix) and name != METADATA and name.removeprefix(prefix) not in found.companions
        }
        shapes = {name: tuple(entry["shape"]) for name, entry in own.items()}
        types = {name: entry["dtype"] for name, entry in own.items() if name not in found.scaled}
        return cls(file, prefix, shapes, types, found.scaled, found.unread)

    @property
    def not_read(self) -> str:
        """How these tensors are quantized, where that form is not read."""
        return self.unread or how_quantized(self.types)

    def inside(self, prefix: str) -> Stored:
        """The tensors whose names begin with a further prefix."""
        return Stored(
            self.file,
            self.prefix + prefix,
            {name.removeprefix(prefix): shape for name, shape in self.shapes.items() if name.startswith(prefix)},
            {name.removeprefix(prefix): kind for name, kind in self.types.items() if name.startswith(prefix)},
            {name.removeprefix(prefix): how for name, how in self.scaled.items() if name.startswith(prefix)},
        )

    def place(self, name: str, **how: Any) -> Place:
        return Place(self.file, self.prefix + name, **how, scaled=self.scaled.get(name))

    def count(self, before: str) -> int:
        """How many numbered modules follow `before`: 24 where `layers.23.…` is the last of `layers.`."""
        found = [COUNTED.match(name, len(before)) for name in self.shapes if name.startswith(before)]
        return max((int(number[0]) for number in found if number), default=-1) + 1

    def side(self, name: str, axis: int) -> int:
        """A side of a tensor. Raises UsageError where there is none, or nothing in it."""
        shape = self.shapes.get(name, ())
        if not -len(shape) <= axis < len(shape) or not shape[axis]:
            refuse_sides(self, name)
        return shape[axis]


@dataclass(frozen=True)
class SingleFile:
    """A base model in one file. `denoiser` holds its tensors; `header` is that of the file."""

    file: Path
    family: str
    denoiser: Stored
    header: Mapping[str, Any]
    prediction: str | None = None  # of models with a noise schedule
    prediction_by: str = ""  # what in the file shows the prediction, for people
    zero_terminal: bool = False  # the last step of the schedule holds no signal
    variant: str = ""  # which of the family's models, where its config or schedule is another
    flavors: tuple[str, ...] = ()  # the variants that the keys leave open: `model.flavor` names one
    note: str = ""  # an assumption that the file does not confirm, and the fix if it is wrong
    form: str = ""  # in which quantized form the denoiser is stored, for people

    @property
    def title(self) -> str:
        """What the file's metadata calls the model (ModelSpec); empty where it has none."""
        return str((self.header.get(METADATA) or {}).get(TITLE, ""))[:LONGEST_TITLE]

    def part(self, prefix: str) -> Stored:
        """The tensors of one part."""
        return Stored.of(self.file, self.header, prefix)


@dataclass(frozen=True)
class Part:
    """A part of a model as a folder of diffusers has it: its config, and where each weight lies."""

    config: Mapping[str, Any]
    places: Mapping[str, Place]


def renamed(stored: Stored, rename: Callable[[str], str | None], squeezed: Collection[str] = ()) -> dict[str, Place]:
    """Places by new names, for parts that hold the same tensors. Those that `rename` has no name for are skipped.

    `squeezed` are endings of new names whose tensors are convolutions of one pixel, and linear in diffusers.
    """
    found = {}
    for name in stored.shapes:
        if (new := rename(name)) is not None:
            found[new] = stored.place(name, squeezed=new.endswith(tuple(squeezed)) if squeezed else False)
    return found


def stored_form(stored: Stored) -> str:
    """In which quantized form a part is stored, most numbers first: `GGUF Q4_K, F16`; empty where it is in none."""
    if is_gguf(stored.file):
        numbers: Counter[str] = Counter()
        for name, kind in stored.types.items():
            numbers[kind] += math.prod(stored.shapes[name])
        return f"GGUF {', '.join(kind for kind, _ in numbers.most_common())}"
    forms = Counter(FORMS_SHOWN[how.form] + " rotated" * bool(how.rotated) for how in stored.scaled.values())
    return f"{', '.join(form for form, _ in forms.most_common())} with scales" if forms else ""


def by_layout(stored: Stored, layout: Layout, known: Iterable[str] = ()) -> dict[str, Place]:
    """Places by diffusers' names, as a table of rules pairs them. Rules are of modules, or of whole names of tensors.

    Raises UsageError for tensors that no rule knows, besides those whose names end as in `known`.
    """
    rules: dict[str, list[Rule]] = defaultdict(list)
    for rule in layout:
        rules[_shape_of(rule.original.replace("{}", "0"))].append(rule)
    found: dict[str, Place] = {}
    unknown = []
    for name, shape in stored.shapes.items():
        module, _, leaf = name.rpartition(".")
        pairs = [(rule, numbers, "") for rule, numbers in _matching(rules, name)]
        pairs += [(rule, numbers, f".{leaf}") for rule, numbers in _matching(rules, module)]
        for rule, numbers, ending in pairs:
            found[rule.ours.format(*numbers) + ending] = stored.place(name, rows=_rows(rule, shape))
        if not pairs and not name.endswith(tuple(known)):
            unknown.append(name)
    if unknown:
        refuse_unknown(stored, unknown)
    return found


def refuse_not_read(stored: Stored) -> None:
    """Raise UsageError for tensors of a quantized form that is not read."""
    if how := stored.not_read:
        raise UsageError(Problem("model_is_quantized", f"{stored.file} is quantized ({how}).", UNQUANTISED))


def refuse_sides(stored: Stored, name: str) -> NoReturn:
    """Raise UsageError for a tensor that is not there, or no known model's."""
    message = f"{stored.file} lacks {stored.prefix}{name}, or it has other sides than that of a known model."
    raise UsageError(Problem("model_incomplete", message, "Copy or download the file again."))


def refuse_unknown(stored: Stored, names: Iterable[str]) -> None:
    """Raise UsageError for tensors that are no part of an architecture."""
    first = sorted(names)
    shown = ", ".join(f"{stored.prefix}{name}"[:80] for name in first[:SHOWN])
    message = f"{stored.file} holds {len(first)} tensors that no known model has: {shown}."
    raise UsageError(
        Problem("model_has_extra_tensors", message, "Use the plain model, or its folder in diffusers' layout.")
    )


def _shape_of(name: str) -> str:
    return NUMBER.sub("0", name)


def _matching(rules: Mapping[str, list[Rule]], name: str) -> Iterable[tuple[Rule, list[str]]]:
    for rule in rules.get(_shape_of(name), ()):
        pattern = re.escape(rule.original).replace(r"\{\}", r"(\d+)")
        if matched := re.fullmatch(pattern, name):
            yield rule, list(matched.groups())


def _rows(rule: Rule, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """The rows of a fused layer that a rule means; none where it means all of them as they are."""
    if len(rule.shares) == 1 and not rule.swapped:
        return ()
    rows = shape[0] if shape else 0
    share = rows // sum(rule.shares)
    begin = share * sum(rule.shares[: rule.part])
    end = begin + share * rule.shares[rule.part]
    middle = (begin + end) // 2
    return ((middle, end), (begin, middle)) if rule.swapped else ((begin, end),)
