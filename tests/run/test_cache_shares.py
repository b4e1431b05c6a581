"""Which processes of a run fill a cache together: those that need the same entries in the same folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lora_trainer.data.caches.cache import CachePlan
from lora_trainer.data.caches.filling import ALONE, Share
from lora_trainer.data.caches.sharing import in_use
from lora_trainer.run.caching import CachePlans
from lora_trainer.run.session import share_of
from lora_trainer.training.processes import Processes

ONE = Processes(0, 1, torch.device("cpu"), None, lambda: None)


def plans_of(folder: Path, keys: tuple[str, ...]) -> CachePlans:
    plan: CachePlan = CachePlan("latents", folder, torch.float32, (), keys, (), (), lambda index: ("", {}))
    return CachePlans(plan, replace(plan, kind="texts", keys=()))


def shares(places: list[tuple[Path, tuple[str, ...]]], notes: list[str]) -> list[tuple[int, int]]:
    """The share of each process, which fills a folder with some keys and has a note there."""
    sent: list[Tensor] = []

    def send(_: Tensor, mine: Tensor) -> None:
        sent.append(mine.clone())

    def gather(whole: Tensor, mine: Tensor) -> None:
        assert len(whole) == len(notes) * len(mine)
        whole.copy_(torch.cat(sent))

    def share_each(meet: Callable[[Tensor, Tensor], None]) -> list[Share]:
        processes = replace(ONE, world=len(notes), gather=meet)
        return [share_of(processes, plans_of(*place), note) for place, note in zip(places, notes, strict=True)]

    share_each(send)
    found = share_each(gather)
    return [(share.index, share.count) for share in found]


@pytest.mark.parametrize(
    ("folders", "keys", "expected"),
    [
        ("aaa", "kkk", [(0, 3), (1, 3), (2, 3)]),
        ("aba", "kkk", [(0, 2), (0, 1), (1, 2)]),  # a disk of its own
        ("aaa", "klk", [(0, 2), (0, 1), (1, 2)]),  # another precision
    ],
)
def test_processes_divide_what_they_share(
    tmp_path: Path, folders: str, keys: str, expected: list[tuple[int, int]]
) -> None:
    places = [(tmp_path / folder, (key * 64,)) for folder, key in zip(folders, keys, strict=True)]
    with in_use(places[0][0]) as first, in_use(places[1][0]) as second, in_use(places[2][0]) as third:
        assert shares(places, [first, second, third]) == expected


def test_a_process_that_cannot_write_its_note_is_alone(tmp_path: Path) -> None:
    assert share_of(ONE, plans_of(tmp_path, ("k" * 64,)), "ab" * 16) == ALONE
