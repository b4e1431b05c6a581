"""A model without a memory profile needs few traces, and its plan is the same as with all."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from lora_trainer.memory_plan.estimate import _few_blocks, _micro_batches, choose_fit
from lora_trainer.memory_plan.profiles import Footprint, Sizes
from tests.run.test_plan import plan_for


@given(
    st.sampled_from(("sd15", "sdxl", "flux")),
    st.integers(1, 9),
    st.floats(2.0, 40.0),
    st.one_of(st.none(), st.integers(1, 6)),
)
def test_few_sizes_are_traced_and_the_choice_is_that_of_all(
    family: str, samples: int, limit: float, most: int | None
) -> None:
    """The footprint of a model without a memory profile takes seconds."""
    demand = plan_for(family=family, memory__limit_gib=24.0).demand
    traced, memory_model = set[tuple[Sizes, str]](), demand.memory_model

    def footprint(sizes: Sizes, precision: str) -> Footprint:
        traced.add((sizes, precision))
        return memory_model.footprint(sizes, precision)

    few_blocks = replace(memory_model, footprint=footprint, stride=-(-memory_model.blocks // 6))
    demand = replace(demand, samples=samples, limit_gib=limit, max_micro=most, memory_model=few_blocks)
    chosen = choose_fit(demand)
    few = len({each for each in traced if not each[0].swapped})
    every = [
        plan
        for precision in demand.precisions
        for plan in (
            *_micro_batches(demand, min(samples, most or samples), precision),
            _few_blocks(demand, precision),
        )
    ]
    fitting = next((plan for plan in every if plan.fits), None)
    assert chosen == fitting if fitting else (chosen.swapped or not chosen.fits)
    assert few <= 3 * len(demand.precisions) + 8
