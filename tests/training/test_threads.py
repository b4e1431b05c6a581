"""The number of CPU threads: by the user, the launcher, the container limit, other processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lora_trainer.core.hardware import available_cpus, cpu_quota
from lora_trainer.training.threads import MOST, choose_threads

CHOICE = "from lora_trainer.training.threads import choose_threads; print(choose_threads({}).count)"
USERS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "LOCAL_WORLD_SIZE", "ACCELERATE_MIXED_PRECISION")


def chosen(*command: str, **environment: str) -> int:
    """The choice of a separate process, with only `environment` set."""
    clean = {name: value for name, value in os.environ.items() if name not in USERS}
    program = [sys.executable, *(command or ("-c", CHOICE.format("None")))]
    done = subprocess.run(program, env=clean | environment, capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_a_number_in_the_config_counts_up_to_the_available_cpus() -> None:
    cpus = available_cpus()
    assert choose_threads(1).count == 1
    more = choose_threads(cpus + 5, recorded=1)
    assert (more.count, more.reason) == (cpus, f"hardware.threads={cpus + 5}, but {cpus} CPUs are available")


def test_a_run_with_more_threads_from_the_environment_repeats_with_them() -> None:
    more = available_cpus() + 2
    assert chosen("-c", CHOICE.format(more), OMP_NUM_THREADS=str(more)) == more
    assert chosen("-c", CHOICE.format(more + 1), OMP_NUM_THREADS=str(more)) == more


def test_the_environment_takes_precedence_over_the_recorded_threads() -> None:
    assert chosen("-c", CHOICE.format("None, recorded=2"), OMP_NUM_THREADS="1") == 1
    assert chosen("-c", CHOICE.format("None, recorded=1")) == 1


@pytest.fixture
def chosen_under_the_launcher(tmp_path: Path) -> Callable[..., int]:
    """The user's setting for a script that `accelerate launch` starts with these flags and variables. 0 for none."""
    script = tmp_path / "script.py"
    choice = "from lora_trainer.training.threads import choose_threads; found = choose_threads(None)"
    script.write_text(f"{choice}\nprint(found.count if 'NUM_THREADS' in found.reason else 0)", encoding="utf-8")
    launch = ["-m", "accelerate.commands.launch", "--quiet", "--num_processes", "1", "--num_machines", "1"]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no"]

    def choose(*flags: str, **environment: str) -> int:
        return chosen(*launch, *flags, str(script), **environment)

    return choose


def test_a_user_setting_of_one_thread_is_kept_and_the_launchers_is_not(
    chosen_under_the_launcher,
) -> None:
    assert chosen_under_the_launcher(OMP_NUM_THREADS="1") == 1
    assert chosen_under_the_launcher("--num_cpu_threads_per_process", "1") == 1
    assert chosen_under_the_launcher() == 0, "the launcher's own one thread is not the user's word"


def test_mkl_num_threads_and_the_dashed_flag_count_under_the_launcher(
    chosen_under_the_launcher,
) -> None:
    assert chosen_under_the_launcher(MKL_NUM_THREADS="1") == 1
    assert chosen_under_the_launcher("--num-cpu-threads-per-process=3") == 3


def test_an_accelerate_variable_alone_is_no_launch(monkeypatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert choose_threads(None).count == 4


def test_a_run_resumed_by_more_processes_shares_the_cpus(monkeypatch) -> None:
    for name in USERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert choose_threads(None, recorded=64).count == max(1, available_cpus() // 2)


def test_processes_of_one_machine_share_its_cpus(monkeypatch) -> None:
    for name in USERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert choose_threads(None).count == max(1, min(MOST, available_cpus() // 2))


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    found = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in found:
            process.kill()
            process.wait()


@pytest.mark.slow  # the average over a minute needs most of one to rise
@pytest.mark.skipif(sys.platform != "linux", reason="loads are measured on Linux")
def test_a_run_leaves_cpus_that_others_keep_busy() -> None:
    cpus = available_cpus()
    with busy_processes(cpus):
        deadline = time.monotonic() + 300
        while os.getloadavg()[0] < cpus - 0.4:
            assert time.monotonic() < deadline
            time.sleep(1)
        assert chosen() == 1


@pytest.mark.parametrize(
    ("groups", "files", "quota"),
    [
        ("0::/", {"cpu.max": "150000 100000"}, 1.5),
        ("0::/a/b", {"cpu.max": "max 100000", "a/cpu.max": "200000 100000", "a/b/cpu.max": "max 100000"}, 2.0),
        ("0::/a/b", {"a/cpu.max": "200000 100000", "a/b/cpu.max": "50000 100000"}, 0.5),
        ("0::/elsewhere", {"cpu.max": "max 100000"}, None),
        ("3:cpu,cpuacct:/x", {"cpu/x/cpu.cfs_quota_us": "300000", "cpu/x/cpu.cfs_period_us": "100000"}, 3.0),
        ("3:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("3:memory:/x\n0::/", {"memory/x/cpu.cfs_quota_us": "1"}, None),
        ("3:cpu:/docker/1", {"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, 1.0),
    ],
)
def test_the_quota_of_a_container_is_read_in_both_versions(groups, files, quota, tmp_path) -> None:
    (tmp_path / "own").write_text(groups + "\n", encoding="ascii")
    for name, text in files.items():
        file = tmp_path / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n", encoding="ascii")
    assert cpu_quota(tmp_path / "own", tmp_path / "cgroup") == quota


def test_without_control_groups_there_is_no_quota(tmp_path) -> None:
    assert cpu_quota(tmp_path / "absent", tmp_path) is None
