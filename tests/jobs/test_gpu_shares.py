"""The part of a GPU of each job, by its memory plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st

from lora_trainer.config.layers import Layer, Resolved
from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.jobs import gpu_shares
from lora_trainer.jobs.gpu_shares import STEPS, GpuShares, limit_of, limited, lines_of, share_of_limit
from lora_trainer.memory_plan.estimate import LARGEST_SHARE
from lora_trainer.run.plans.plan import make_plan
from lora_trainer.run.settings import settle


def settings(family: str, **values: object) -> Resolved:
    """Settings of a published model, which needs no files."""
    document: dict[str, dict[str, object]] = {"model": {"family": family}}
    for name, value in values.items():
        section, key = name.split("__")
        document.setdefault(section, {})[key] = value
    return settle([], [Layer("--set", document)], builtin_if_none=False)


@pytest.mark.parametrize(
    ("limit_gib", "gpu_gib", "share"),
    [(None, 24.0, 1.0), (12.0, None, 1.0), (12.0, 23.6, 0.5), (8.0, 24.0, 0.3333), (12.0, 8.0, 1.0)],
)
def test_as_many_jobs_share_a_gpu_as_their_limit_goes_into_it(limit_gib, gpu_gib, share):
    assert share_of_limit(limit_gib, gpu_gib) == share


def test_the_shares_are_parts_that_ray_can_count():
    assert STEPS[0] == 0.05
    assert STEPS[-1] == 1.0
    assert {0.3333, 0.25, 0.1666} < set(STEPS)
    assert all(round(step, 4) == step and int(1 / step + 1e-6) * step <= 1.0 for step in STEPS)


@pytest.mark.parametrize("family", ["sd15", "sdxl", "flux"])
@settings_of_hypothesis(max_examples=25)
@given(gpu_gib=st.floats(8.0, 200.0), micro=st.integers(1, 8))
def test_a_job_trains_with_its_share_as_alone_on_the_gpu_and_all_of_a_gpu_fit(family, gpu_gib, micro):
    """The law of a share: the same plan within its limit, and as many of them as Ray puts there fit together."""
    wanted = settings(family, train__effective_batch_size=8, train__max_micro_batch_size=micro)
    share = GpuShares([gpu_gib]).of(wanted)
    alone = make_plan(wanted, gpu_gib=gpu_gib, data=((), ()))
    held = make_plan(limited(wanted, share.limit_gib), gpu_gib=gpu_gib, data=((), ()))
    assert alone.fits
    assert held.fits
    assert replace(held.fit, reasons=()) == replace(alone.fit, reasons=())
    assert share.peak_gib == alone.fit.parts.peak
    assert share.gpus in STEPS
    on_one = int(1 / share.gpus + 1e-6)
    assert on_one * share.peak_gib <= LARGEST_SHARE * gpu_gib + 1e-6
    assert on_one * (share.limit_gib or gpu_gib) <= gpu_gib + 1e-6


def test_a_limit_of_the_job_stays_and_decides_its_share():
    wanted = settings("sdxl", memory__limit_gib=12.0)
    share = GpuShares([23.99]).of(wanted)
    assert (share.gpus, share.limit_gib) == (0.5, None)
    assert limited(wanted, share.limit_gib) is wanted
    assert lines_of([(share, 12.0)]) == ["GPU share: 0.5 (memory.limit_gib=12 of 24 GiB), 1 job"]


def test_a_share_that_the_user_chose_limits_the_run_unless_its_own_limit_is_lower():
    share = GpuShares([79.6, 24.0]).fixed(0.5)
    assert (share.gpus, share.gpu_gib, share.limit_gib) == (0.5, 24.0, 12.0)
    held = limited(settings("sdxl", memory__limit_gib=20.0), share.limit_gib)
    assert held.config.memory.limit_gib == 12.0
    assert held.origin["memory.limit_gib"] == "GPU share"
    assert limited(settings("sdxl", memory__limit_gib=8.0), share.limit_gib).config.memory.limit_gib == 8.0
    assert GpuShares([]).fixed(0.5).limit_gib is None, "the GPU's memory is not known"
    assert GpuShares([24.0]).fixed(1.0).limit_gib is None
    assert limit_of(0.5, 23.99) == 11.99


def test_of_several_sizes_the_smallest_that_fits_is_taken():
    """A limit is to be had in full where a GPU has it; a whole GPU is planned alike wherever the job continues."""
    sizes = [79.6, 11.99, 2.0, 23.99]
    assert GpuShares(sizes).of(settings("sd15")).gpu_gib == 2.0
    whole = GpuShares(sizes).of(settings("flux"))
    assert (whole.gpus, whole.gpu_gib, whole.limit_gib) == (1.0, 11.99, 11.99)
    assert GpuShares(sizes).of(settings("flux", memory__limit_gib=20.0)).gpu_gib == 23.99
    assert GpuShares(sizes).of(settings("sd15", memory__limit_gib=100.0)).gpu_gib == 79.6


def test_a_job_that_fits_no_gpu_is_refused_with_the_numbers_and_what_would():
    with pytest.raises(UsageError) as refused:
        GpuShares([2.0, 1.5]).of(settings("flux"))
    (problem,) = refused.value.problems
    assert "Training needs 4.2 GiB at its peak" in problem.message
    assert "The largest GPU of the cluster has 2 GiB." in problem.message
    assert problem.fix == "It would fit a GPU of 5 GiB."


def test_equal_settings_are_planned_once_and_jobs_without_a_plan_have_their_limits_share(monkeypatch):
    made = []

    def plan(resolved: Resolved, **others: object) -> object:
        made.append(resolved)
        if resolved.config.model.family == "flux":
            raise UsageError(Problem("planted", "There is no model ./flux.", "Name another."))
        return make_plan(resolved, **others)

    monkeypatch.setattr(gpu_shares, "make_plan", plan)
    shares = GpuShares([24.0])
    found = [
        shares.of(settings("sdxl", run__name=f"run-{number}", data__sources=[f"/images/{number}"]))
        for number in range(200)
    ]
    assert len(set(found)) == 1
    planned = len(made)
    assert planned <= 3
    assert lines_of([(share, None) for share in found]) == ["GPU share: 0.55 (plan: 11.7 GiB of 24 GiB), 200 jobs"]

    without = [
        shares.of(settings("flux", memory__limit_gib=8.0, data__sources=[f"/images/{number}"])) for number in range(3)
    ]
    assert {share.gpus for share in without} == {0.3333}
    assert len(made) == planned + 1
    assert shares.no_plan == {"There is no model ./flux.": 3}


def test_gpus_of_unknown_memory_are_not_shared_without_a_limit():
    shares = GpuShares([])
    assert shares.of(settings("sdxl")).gpus == 1.0
    assert shares.no_plan == {"the memory of the GPUs is not known": 1}
