"""One cache filled by several processes at once, killed at any moment, on a full disk."""

from __future__ import annotations

import hashlib
import itertools
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lora_trainer.core.errors import TrainingFailed
from lora_trainer.data import process_notes
from lora_trainer.data.caches import claims, filling, packing
from lora_trainer.data.caches.claims import Claims, in_use, oldest_user
from lora_trainer.data.caches.filling import Work, build_missing
from lora_trainer.data.caches.packing import pack
from lora_trainer.data.caches.shards import Shard
from lora_trainer.data.caches.store import Shelf, Store, write_entries
from lora_trainer.data.caches.upkeep import cache_clean, cache_status, keep_limit

forked = pytest.mark.skipif(sys.platform != "linux", reason="tests fork, which is safe with torch on Linux only")


def key_of(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def value_of(key: str) -> float:
    return float(int(key[:4], 16))


def work_of(
    folder: Path, count: int, log: Path | None = None, *, seconds: float = 0.0, start: float = 0.0, batch: int = 3
) -> Work[str]:
    """Entries with the number of their key. Each encoded key is a line in `log`."""
    keys = [key_of(number) for number in range(count)]

    def encode(places: list[int], prepared: list[str]) -> dict[str, Tensor]:
        if log is not None:
            with open(log, "ab", buffering=0) as file:
                file.write("".join(f"{keys[place]}\n" for place in places).encode())
        time.sleep(seconds)
        return {"a": torch.stack([torch.full((4, 2), value_of(key)) for key in prepared])}

    return Work(
        folder, "latents", keys, lambda place: place % 2, keys.__getitem__, encode, str, batch, workers=2, start=start
    )


def encoded(log: Path) -> list[str]:
    return log.read_text().split() if log.exists() else []


def assert_whole(folder: Path, count: int) -> None:
    """All entries exist, are right, and are in few files. Nothing else remains."""
    store = Store(folder, "latents")
    for number in range(count):
        assert store.read(key_of(number))["a"].unique().tolist() == [value_of(key_of(number))]
    assert cache_status(folder).counts["latents"] == count


def fork(function: Callable[..., object], *arguments: object, **named: object) -> BaseProcess:
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments, kwargs=named)
    process.start()
    return process


def fill(folder: Path, count: int, log: Path, seconds: float, start: float) -> None:
    build_missing(work_of(folder, count, log, seconds=seconds, start=start))


@pytest.fixture
def packs_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packs after a few batches instead of 64 MB."""
    monkeypatch.setattr(filling, "SMALL", 3000)
    monkeypatch.setattr(packing, "SMALL", 6000)


@forked
@pytest.mark.usefixtures("packs_early")
def test_processes_build_each_entry_once(tmp_path: Path) -> None:
    """Entries that another has claimed come last."""
    log = tmp_path / "log"
    started = [fork(fill, tmp_path / "cache", 120, log, 0.002, start) for start in (0.0, 0.0, 0.5)]
    for process in started:
        process.join(300)
        assert process.exitcode == 0
    assert max(Counter(encoded(log)).values()) == 1
    assert len(encoded(log)) == 120
    assert_whole(tmp_path / "cache", 120)
    assert len(list((tmp_path / "cache" / "latents").iterdir())) < 20


def test_threads_of_one_process_share_the_work(tmp_path: Path) -> None:
    log = tmp_path / "log"
    threads = [threading.Thread(target=fill, args=(tmp_path / "cache", 40, log, 0.001, 0.0)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(Counter(encoded(log)).values()) == 1
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
        now = set(Shelf(cache, "latents"))
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
@pytest.mark.usefixtures("packs_early")
def test_a_killed_fill_loses_only_the_current_batch(tmp_path: Path) -> None:
    assert killed_fills(tmp_path, 300, kills=3) == 3


@forked
@pytest.mark.slow
@pytest.mark.usefixtures("packs_early")
def test_fifty_kills(tmp_path: Path) -> None:
    assert killed_fills(tmp_path, 6000, kills=50) == 50


@forked
def test_claims_of_a_killed_process_are_built_by_another(tmp_path: Path) -> None:
    log = tmp_path / "log"
    stuck = fork(fill, tmp_path / "cache", 12, log, 100.0, 0.0)
    while not encoded(log):
        time.sleep(0.01)
    other = threading.Thread(target=fill, args=(tmp_path / "cache", 12, log, 0.0, 0.0))
    other.start()
    time.sleep(0.2)
    assert other.is_alive(), "it waits for the other's batch"
    os.kill(stuck.pid or 0, signal.SIGKILL)
    other.join(300)
    assert not other.is_alive()
    assert_whole(tmp_path / "cache", 12)


@forked
def test_a_claim_belongs_to_one_process(tmp_path: Path) -> None:
    def try_it(answers: Sequence[str]) -> None:
        with Claims(tmp_path) as own:
            os._exit(sum(own.take(key) for key in answers))

    with Claims(tmp_path) as mine:
        assert mine.take(key_of(1))
        assert not mine.take(key_of(1)), "another thread of this process has it"
        child = fork(try_it, [key_of(1), key_of(2)])
        child.join(300)
        assert child.exitcode == 1
    child = fork(try_it, [key_of(1), key_of(2)])
    child.join(300)
    assert child.exitcode == 2


def on_another_machine(monkeypatch: pytest.MonkeyPatch, name: str, hours: float) -> None:
    """This process seems to be one of another machine, with a clock of its own."""
    true = time.time
    monkeypatch.setattr(process_notes, "this_machine", lambda: name)
    monkeypatch.setattr(time, "time", lambda: true() + 3600 * hours)


@pytest.fixture
def short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that gets no CPU for seconds does not count as silent."""
    monkeypatch.setattr(process_notes, "RENEW_SECONDS", 0.05)
    for module in (process_notes, claims):
        monkeypatch.setattr(module, "SILENT_SECONDS", 4.0)


@forked
@pytest.mark.usefixtures("packs_early")
def test_machines_with_different_clocks_build_each_entry_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one lock: they know of each other by files only."""

    def fill_elsewhere(name: str, hours: float) -> None:
        on_another_machine(monkeypatch, name, hours)
        fill(tmp_path / "cache", 100, tmp_path / "log", 0.01, 0.0)

    started = [fork(fill_elsewhere, f"machine {number}", 5.0 * number) for number in range(3)]
    for process in started:
        process.join(300)
        assert process.exitcode == 0
    assert max(Counter(encoded(tmp_path / "log")).values()) == 1
    assert_whole(tmp_path / "cache", 100)
    assert not list((tmp_path / "cache" / "building").iterdir())
    assert not list((tmp_path / "cache" / "users").iterdir())


@forked
@pytest.mark.usefixtures("short_silence")
def test_a_claim_of_another_machine_is_over_when_it_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hold() -> None:
        on_another_machine(monkeypatch, "another", -7.0)
        with in_use(tmp_path), Claims(tmp_path) as theirs:
            assert theirs.take(key_of(1))
            (tmp_path / "ready").touch()
            time.sleep(100)

    other = fork(hold)
    while not (tmp_path / "ready").exists():
        time.sleep(0.01)
    (note,) = (tmp_path / "users").iterdir()
    renewed = note.stat().st_mtime_ns
    while note.stat().st_mtime_ns == renewed:
        time.sleep(0.01)
    shard = aged(tmp_path, 1, time.time() + 60)
    with Claims(tmp_path) as mine:
        assert not mine.take(key_of(1)), "it renews its time"
        assert keep_limit(tmp_path, 0).removed == 0
        os.kill(other.pid or 0, signal.SIGKILL)
        other.join(300)
        assert not mine.take(key_of(1)), "nobody knows yet that it was killed"
        while not mine.take(key_of(1)):
            time.sleep(0.05)
        with Claims(tmp_path) as third:
            assert not third.take(key_of(1)), "it was taken over once"
    assert keep_limit(tmp_path, 0).removed == 1
    assert not shard.exists()
    assert not [path for name in ("building", "users") for path in (tmp_path / name).iterdir()]


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
    with files_at_most(400), pytest.raises(TrainingFailed, match=r"cannot be written.*cache\.dir"):
        build_missing(work_of(tmp_path, 10))
    assert not list((tmp_path / "latents").iterdir())
    build_missing(work_of(tmp_path, 10))
    assert_whole(tmp_path, 10)


@pytest.mark.skipif(sys.platform == "win32", reason="no such limit")
def test_a_disk_too_full_to_pack_loses_nothing(tmp_path: Path) -> None:
    with files_at_most(700):
        build_missing(work_of(tmp_path, 20))
    assert len(list((tmp_path / "latents").iterdir())) > 5
    assert_whole(tmp_path, 20)
    cache_clean(tmp_path)
    assert len(list((tmp_path / "latents").iterdir())) == 1
    assert_whole(tmp_path, 20)


def test_reading_while_another_packs(tmp_path: Path) -> None:
    build_missing(work_of(tmp_path, 30))
    stop, wrong = threading.Event(), list[str]()

    def read() -> None:
        draw = random.Random(3)
        while not stop.is_set():
            store = Store(tmp_path, "latents")
            for _ in range(5):
                key = key_of(draw.randrange(30))
                if store.read(key)["a"].unique().tolist() != [value_of(key)]:
                    wrong.append(key)

    with pytest.MonkeyPatch.context() as patch:
        reader = threading.Thread(target=read)
        reader.start()
        for number in range(40):
            patch.setattr(packing, "SMALL", 10**9)
            write_entries(
                tmp_path, "latents", [key_of(number % 30)], {"a": torch.full((1, 4, 2), value_of(key_of(number % 30)))}
            )
            pack(tmp_path, "latents", list((tmp_path / "latents").glob("*.safetensors")))
        assert reader.is_alive()
        stop.set()
        reader.join()
    assert not wrong
    assert_whole(tmp_path, 30)


def aged(folder: Path, number: int, used: float) -> Path:
    path = write_entries(folder, "latents", [key_of(number)], {"a": torch.zeros(1, 1000)})
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
        work = work_of(tmp_path, 2)  # which finds the second and builds the first
        build_missing(work)
        third = aged(tmp_path, 3, 3000)
        kept = keep_limit(tmp_path, 100)
        assert not third.exists()
        assert old.exists()
        assert kept.needed == kept.left_bytes == cache_status(tmp_path).bytes
        assert "above the limit of 100 bytes: they are kept" in kept.lines[-1]
    assert not cache_status(tmp_path).in_use
    assert keep_limit(tmp_path, 0).left_bytes == 0


@forked
def test_a_killed_run_holds_no_entries(tmp_path: Path) -> None:
    def use() -> None:
        with in_use(tmp_path):
            (tmp_path / "ready").touch()
            time.sleep(100)

    user = fork(use)
    while not (tmp_path / "ready").exists():
        time.sleep(0.01)
    (note,) = (tmp_path / "users").iterdir()
    began = oldest_user(tmp_path)
    assert began is not None
    shard = aged(tmp_path, 1, began + 1)
    assert keep_limit(tmp_path, 0).removed == 0
    os.kill(user.pid or 0, signal.SIGKILL)
    user.join(300)
    assert keep_limit(tmp_path, 0).removed == 1
    assert not shard.exists()
    assert not note.exists()


def test_a_removed_cache_is_started_again(tmp_path: Path) -> None:
    import shutil

    build_missing(work_of(tmp_path / "cache", 5))
    shutil.rmtree(tmp_path / "cache")
    assert build_missing(work_of(tmp_path / "cache", 5)) == 5
    assert_whole(tmp_path / "cache", 5)
    assert [Shard(path).count for path in (tmp_path / "cache" / "latents").iterdir()] == [5]
