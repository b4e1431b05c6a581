"""Filling caches by several processes and runs, kills, full disks, and the limit."""

from __future__ import annotations

import errno
import hashlib
import itertools
import multiprocessing
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lora_trainer.core.errors import TrainingFailed
from lora_trainer.data.caches import sharing
from lora_trainer.data.caches.entries import Store, entry_sizes, mark_used, write_entries
from lora_trainer.data.caches.files import entry_path
from lora_trainer.data.caches.filling import Share, Work, build_missing
from lora_trainer.data.caches.pruning import cache_clean, cache_status, keep_limit
from lora_trainer.data.caches.sharing import PRUNING, in_use, oldest_user, one_at_a_time

forked = pytest.mark.skipif(sys.platform != "linux", reason="tests fork, which is safe with torch on Linux only")


def key_of(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def value_of(key: str) -> float:
    return float(int(key[:4], 16))


def work_of(folder: Path, count: int, log: Path | None = None, *, seconds: float = 0.0, batch: int = 3) -> Work[str]:
    """Entries with the number of their key. Each encoded key is a line in `log`."""
    keys = [key_of(number) for number in range(count)]

    def encode(places: list[int], prepared: list[str]) -> dict[str, Tensor]:
        if log is not None:
            with open(log, "ab", buffering=0) as file:
                file.write("".join(f"{keys[place]}\n" for place in places).encode())
        time.sleep(seconds)
        return {"a": torch.stack([torch.full((4, 2), value_of(key)) for key in prepared])}

    return Work(folder, "latents", keys, lambda place: place % 2, keys.__getitem__, encode, str, batch, workers=2)


def in_batches(work: Work[str]) -> Work[str]:
    """The same with entries that depend on those encoded with them, as the last bits of a real encoder's do."""

    def encode(places: list[int], prepared: list[str]) -> dict[str, Tensor]:
        return {"a": torch.tensor([[value_of(key), hash(tuple(places)) % 9973] for key in prepared])}

    return replace(work, encode=encode)


def encoded(log: Path) -> list[str]:
    return log.read_text().split() if log.exists() else []


def assert_whole(folder: Path, count: int) -> None:
    """All entries exist and are right."""
    store = Store(folder, "latents")
    for number in range(count):
        assert store.read(key_of(number))["a"].unique().tolist() == [value_of(key_of(number))]
    assert cache_status(folder).counts["latents"] == count


def fork(function: Callable[..., object], *arguments: object, **named: object) -> BaseProcess:
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments, kwargs=named)
    process.start()
    return process


def share_of(index: int, count: int) -> Share:
    def wait_until(ready: Callable[[], bool]) -> None:
        while not ready():
            time.sleep(0.005)

    return Share(index, count, wait_until)


def fill(folder: Path, count: int, log: Path, share: Share) -> None:
    build_missing(replace(work_of(folder, count, log), share=share))


@forked
@pytest.mark.parametrize("there", [0, 50])
def test_the_processes_of_a_run_divide_the_list(tmp_path: Path, there: int) -> None:
    """Also where some entries are there already, and one process begins when others have written some."""
    log = tmp_path / "log"
    build_missing(work_of(tmp_path / "cache", there))
    started = [fork(fill, tmp_path / "cache", 120, log, share_of(index, 3)) for index in (0, 1)]
    while len(encoded(log)) < 10:
        time.sleep(0.001)
    assert all(process.is_alive() for process in started), "they wait for the third"
    started.append(fork(fill, tmp_path / "cache", 120, log, share_of(2, 3)))
    for process in started:
        process.join(300)
        assert process.exitcode == 0
    times = Counter(encoded(log))
    assert set(times.values()) == {1}
    assert times.keys() >= {key_of(number) for number in range(there, 120)}
    assert there or len(times) == 120
    assert len(times) <= 120 - there + 3 * 2 * 2, "of each process and group at most one batch is there in part"
    assert_whole(tmp_path / "cache", 120)


def test_a_process_that_fails_leaves_no_other_waiting(tmp_path: Path) -> None:
    """Whoever watches the processes ends the wait."""

    class LostError(Exception):
        pass

    def lost(ready: Callable[[], bool]) -> None:
        assert not ready()
        raise LostError

    with pytest.raises(LostError):
        build_missing(replace(work_of(tmp_path, 10), share=Share(0, 2, lost)))
    assert cache_status(tmp_path).counts["latents"] == 5


def test_runs_that_fill_at_once_break_nothing(tmp_path: Path) -> None:
    log = tmp_path / "log"
    threads = [threading.Thread(target=fill, args=(tmp_path / "cache", 40, log, Share())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(Counter(encoded(log)).values()) <= 3
    assert_whole(tmp_path / "cache", 40)


def fill_until_killed(folder: Path, count: int, log: Path, batches: int, stuck: Path) -> None:
    """Never ends where there are so many batches to encode: the last of them waits."""
    work, encoding = work_of(folder, count, log, seconds=0.003), itertools.count(1)

    def encode(places: list[int], prepared: list[str]) -> Mapping[str, Tensor]:
        tensors = work.encode(places, prepared)
        if next(encoding) == batches:
            stuck.touch()
            threading.Event().wait()
        return tensors

    build_missing(replace(work, encode=encode))


def killed_fills(folder: Path, count: int, kills: int) -> int:
    """Kill fills repeatedly, then let one end. Returns how many kills hit one at work."""
    hits = 0
    cache, log, stuck, draw = folder / "cache", folder / "log", folder / "stuck", random.Random(7)
    published: set[str] = set()
    for _ in range(kills):
        before = len(encoded(log))
        # Killed at a random batch or behind it, but before it ends, however slow this process is to see that.
        batches = draw.randint(1, 8)
        stuck.unlink(missing_ok=True)
        process = fork(fill_until_killed, cache, count, log, batches + 2, stuck)
        while len(encoded(log)) < before + 3 * batches and not stuck.exists() and process.is_alive():
            time.sleep(0.001)
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join(300)
        hits += process.exitcode == -signal.SIGKILL
        assert not published & set(encoded(log)[before:]), "built again what was published"
        now = set(entry_sizes(cache, "latents", [key_of(number) for number in range(count)]))
        assert published <= now, "lost what was published"
        published = now
        assert len(set(encoded(log)[before:]) - now) <= 3, "more than the batch in hand"
    build_missing(work_of(cache, count, log))
    assert_whole(cache, count)
    again = len(encoded(log))
    build_missing(work_of(cache, count, log))
    assert len(encoded(log)) == again
    cache_clean(cache)
    assert_whole(cache, count)
    return hits


@forked
def test_a_killed_fill_loses_only_the_current_batch(tmp_path: Path) -> None:
    assert killed_fills(tmp_path, 300, kills=3) == 3


@forked
@pytest.mark.slow
def test_fifty_kills(tmp_path: Path) -> None:
    assert killed_fills(tmp_path, 6000, kills=50) == 50


@contextmanager
def files_at_most(size: int) -> Iterator[None]:
    """A disk with a maximum file size."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.skipif(sys.platform == "win32", reason="no such limit")
def test_a_full_disk_leaves_no_partial_file(tmp_path: Path) -> None:
    with files_at_most(200), pytest.raises(TrainingFailed, match=r"cannot be written.*cache\.dir"):
        build_missing(work_of(tmp_path, 10))
    assert not [path for path in (tmp_path / "latents").rglob("*") if path.is_file()]
    build_missing(work_of(tmp_path, 10))
    assert_whole(tmp_path, 10)


def aged(folder: Path, number: int, used: float) -> Path:
    write_entries(folder, "latents", [key_of(number)], {"a": torch.zeros(1, 1000)})
    path = entry_path(folder, "latents", key_of(number))
    os.utime(path, (used, used))
    return path


def test_the_least_recently_used_entries_are_removed_except_those_in_use(tmp_path: Path) -> None:
    old, older = aged(tmp_path, 1, 2000), aged(tmp_path, 2, 1000)
    size = old.stat().st_size
    assert keep_limit(tmp_path, 2 * size).removed == 0
    assert keep_limit(tmp_path, size).removed == 1
    assert old.exists()
    assert not older.exists()
    with in_use(tmp_path):
        assert cache_status(tmp_path).in_use
        build_missing(work_of(tmp_path, 2))  # which finds the second and builds the first
        third = aged(tmp_path, 3, 3000)
        kept = keep_limit(tmp_path, 100)
        assert not third.exists()
        assert old.exists()
        assert kept.needed == kept.left_bytes == cache_status(tmp_path).bytes
        assert "above the limit of 100 bytes: they are kept" in kept.lines[-1]
    assert not cache_status(tmp_path).in_use
    assert keep_limit(tmp_path, 0).left_bytes == 0


def test_an_entry_in_use_is_kept_however_long_the_run_lasts(tmp_path: Path) -> None:
    """It was marked as used once, when the run began; a run that began later does not matter."""
    with in_use(tmp_path) as note:
        began = time.time() - 7 * 86400
        (tmp_path / "users" / note).write_text(str(began))
        kept, removed = aged(tmp_path, 1, began + 1), aged(tmp_path, 2, began - 100)
        with in_use(tmp_path):
            assert keep_limit(tmp_path, 0).removed == 1
        assert kept.exists()
        assert not removed.exists()


def test_marking_waits_for_who_removes(tmp_path: Path) -> None:
    """An entry that a run has found is not removed by a process that looked before."""
    path, found = aged(tmp_path, 1, 1000), list[set[str]]()
    marking = threading.Thread(target=lambda: found.append(mark_used(tmp_path, "latents", [key_of(1)])))
    with one_at_a_time(tmp_path / PRUNING):
        marking.start()
        marking.join(0.3)
        assert not found
        path.unlink()
    marking.join(300)
    assert found == [set()]


@forked
def test_a_killed_process_holds_no_lock(tmp_path: Path) -> None:
    def hold() -> None:
        with one_at_a_time(tmp_path / "lock"):
            (tmp_path / "ready").touch()
            time.sleep(1000)

    holder = fork(hold)
    while not (tmp_path / "ready").exists():
        time.sleep(0.01)
    waits = threading.Event()

    def take() -> None:
        with one_at_a_time(tmp_path / "lock", waits.set):
            pass

    taking = threading.Thread(target=take)
    taking.start()
    assert waits.wait(300)
    assert taking.is_alive()
    os.kill(holder.pid or 0, signal.SIGKILL)
    holder.join(300)
    taking.join(300)
    assert not taking.is_alive()
    assert not (tmp_path / "lock").exists()


@pytest.mark.parametrize("refused", [OSError(errno.ENOLCK, "No locks available"), NotImplementedError()])
def test_on_a_disk_without_locks_nobody_waits(
    tmp_path: Path, refused: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def acquire(*_: object, **__: object) -> None:
        raise refused

    monkeypatch.setattr(sharing.FileLock, "acquire", acquire)
    with one_at_a_time(tmp_path / "lock"), one_at_a_time(tmp_path / "lock"):
        assert build_missing(work_of(tmp_path, 5)) == 5
        assert keep_limit(tmp_path, 0).removed == 5


@forked
def test_a_killed_run_holds_no_entries(tmp_path: Path) -> None:
    def use() -> None:
        with in_use(tmp_path):
            (tmp_path / "ready").touch()
            time.sleep(1000)

    user = fork(use)
    while not (tmp_path / "ready").exists():
        time.sleep(0.01)
    (note,) = (tmp_path / "users").iterdir()
    began = oldest_user(tmp_path)
    assert began is not None
    entry = aged(tmp_path, 1, began + 1)
    assert keep_limit(tmp_path, 0).removed == 0
    os.kill(user.pid or 0, signal.SIGKILL)
    user.join(300)
    assert keep_limit(tmp_path, 0).removed == 0, "nobody knows yet that it was killed"
    silent = note.stat().st_mtime - sharing.SILENT_SECONDS - 1.0
    os.utime(note, (silent, silent))
    assert keep_limit(tmp_path, 0).removed == 1
    assert not entry.exists()
    assert not note.exists()


def test_a_run_renews_its_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after another process took it for ended, as after a computer's sleep. The clocks of machines do not count."""
    monkeypatch.setattr(sharing, "RENEW_SECONDS", 0.01)
    with in_use(tmp_path) as name:
        note = tmp_path / "users" / name
        began = oldest_user(tmp_path)
        os.utime(note, (1000, 1000))
        while note.stat().st_mtime == 1000:
            time.sleep(0.01)
        note.unlink()
        while oldest_user(tmp_path) in (None, 0.0):  # 0.0 while the note is written
            time.sleep(0.01)
        monkeypatch.setattr(time, "time", lambda: 10**10)
        assert oldest_user(tmp_path) == began
    assert not note.exists()


def test_a_removed_cache_is_started_again(tmp_path: Path) -> None:
    build_missing(work_of(tmp_path / "cache", 5))
    shutil.rmtree(tmp_path / "cache")
    assert build_missing(work_of(tmp_path / "cache", 5)) == 5
    assert_whole(tmp_path / "cache", 5)


@pytest.mark.parametrize("lost", [[4], [0, 1, 2, 3], [5, 6, 11], [11]])
def test_what_is_encoded_again_has_the_same_bytes(tmp_path: Path, lost: list[int]) -> None:
    work = in_batches(work_of(tmp_path, 12))
    assert build_missing(work) == 12
    before = {key: entry_path(tmp_path, "latents", key).read_bytes() for key in work.keys}
    for place in lost:
        entry_path(tmp_path, "latents", work.keys[place]).unlink()
    assert build_missing(work) == len(lost)
    assert {key: entry_path(tmp_path, "latents", key).read_bytes() for key in work.keys} == before


def test_images_added_all_over_the_list_do_not_encode_it_again(tmp_path: Path) -> None:
    log = tmp_path / "log"
    work = work_of(tmp_path, 400, log, batch=4)
    lost = work.keys[::8]
    assert build_missing(work) == 400
    log.unlink()
    for key in lost:
        entry_path(tmp_path, "latents", key).unlink()
    assert build_missing(work) == len(lost)
    assert sorted(encoded(log)) == sorted(lost)
