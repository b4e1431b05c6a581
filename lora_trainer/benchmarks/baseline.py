"""Measurements in files: an earlier one to compare with, and rows that the same command continues from. No torch.

A row has become worse where its ratio, its peak, or on a GPU its time is more than 5 % above the baseline's, and above
what nine tenths of the baseline's own steps had. On a CPU times depend on other programs and are not compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from lora_trainer.core.errors import TRAINING_FAILED, Problem, UsageError, UserError
from lora_trainer.core.hardware import package_versions
from lora_trainer.core.io import read_json, write_json

WORSE = 1.05
WRITE = "Write one with lora-trainer bench … --save FILE."
# Of each figure what it is called, and what of the baseline says how noisy it was.
FIGURES = {"ratio": ("ratio", "ratio_p90"), "peak_gib": ("peak GiB", ""), "seconds_median": ("seconds", "seconds_p90")}
FIX = "Measure again on an idle machine, or save the new figures with --save where they are meant."


class Regressed(UserError):
    """A measurement came out more than 5 % above its baseline."""

    exit_code = TRAINING_FAILED


def read_measurement(path: Path, what: str | None = None) -> dict[str, Any]:
    """The document that `bench` wrote. Raises UsageError where it is none, or of another measurement than `what`."""
    try:
        document = read_json(path)
    except FileNotFoundError:
        raise UsageError(Problem("file_missing", f"{path} does not exist.", WRITE)) from None
    except OSError as error:
        raise UsageError(Problem("file_unreadable", f"{path} cannot be read: {error.strerror}.", WRITE)) from None
    except ValueError:
        document = None
    rows = document.get("rows") if isinstance(document, dict) else None
    if not isinstance(rows, list) or "device" not in document or not all(isinstance(row, dict) for row in rows):
        raise UsageError(Problem("not_a_baseline", f"{path} is no JSON document of bench.", WRITE))
    measured = document.get("bench", what)
    if what is not None and measured != what:
        message = f"{path} is of bench {measured}, and this is bench {what}."
        raise UsageError(Problem("baseline_differs", message, WRITE))
    found: dict[str, Any] = document
    return found


@dataclass
class SavedRows:
    """Results by their key, in the file of `--rows` as soon as they are there; without a file only here."""

    path: Path | None
    bench: str
    device: str
    rows: dict[str, dict[str, Any]]

    @classmethod
    def read(cls, path: Path | None, bench: str, device: str) -> SavedRows:
        """What a file has already. Raises UsageError where it is something else, or of another device."""
        if path is None or not path.exists():
            return cls(path, bench, device, {})
        document = read_measurement(path, bench)
        if document["device"] != device:
            message = f"{path} is of {document['device']}, and this is {device}."
            raise UsageError(Problem("baseline_differs", message, "Name another file with --rows."))
        return cls(path, bench, device, {row["key"]: row for row in document["rows"] if "key" in row})

    def save(self, key: str, row: Mapping[str, Any]) -> None:
        self.rows[key] = {**row, "key": key}
        if self.path is not None:
            document = {"bench": self.bench, "device": self.device, "versions": package_versions()}
            write_json(self.path, {**document, "rows": [*self.rows.values()]})


def read_baseline(path: Path, device: str) -> Mapping[str, Any]:
    """The document that `--save` or `--json` wrote. Raises UsageError where it is none, or of another device."""
    document = read_measurement(path)
    if document["device"] != device:
        message = f"{path} was measured on {document['device']}, this is {device}."
        fix = "Figures of two devices cannot be compared: write one here with --save FILE."
        raise UsageError(Problem("baseline_differs", message, fix))
    return document


def compare_with_baseline(baseline: Mapping[str, Any], document: Mapping[str, Any]) -> tuple[list[str], list[Problem]]:
    """A note for each row that only one of them has, and a problem for each figure that is worse."""
    earlier, rows = by_name(baseline["rows"]), by_name(document["rows"])
    notes = [f"{' of '.join(each)}: not in the baseline" for each in rows.keys() - earlier.keys()]
    notes += [f"{' of '.join(each)}: in the baseline only" for each in earlier.keys() - rows.keys()]
    in_both = [each for each in rows if each in earlier]
    if not in_both:
        message = "The baseline has none of the rows that were measured."
        raise UsageError(Problem("baseline_has_no_row", message, "Name one of the same bench."))
    on_gpu = "CPU" not in document["device"]
    problems = [
        Problem("regression", f"{' of '.join(each)}: {worse}.", FIX)
        for each in in_both
        for worse in worse_figures(rows[each], earlier[each], on_gpu=on_gpu)
    ]
    return sorted(notes), problems


def by_name(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], Mapping[str, Any]]:
    return {(str(row.get("name")), str(row.get("model"))): row for row in rows}


def worse_figures(row: Mapping[str, Any], earlier: Mapping[str, Any], *, on_gpu: bool) -> list[str]:
    """Each figure that is more than 5 % above the earlier one, with both."""
    found = []
    for name, (title, noise) in FIGURES.items():
        if name == "seconds_median" and not on_gpu:
            continue
        now, then, highest = row.get(name), earlier.get(name), earlier.get(noise)
        if not is_number(now) or not is_number(then) or now <= WORSE * then:
            continue
        if is_number(highest) and now <= highest:  # the baseline's own steps were that noisy
            continue
        found.append(f"{title} {now:.4g} where it was {then:.4g}, {now / then - 1:.1%} more")
    return found


def is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
