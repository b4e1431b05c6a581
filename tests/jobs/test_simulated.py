"""Many jobs on machines that die and hang, in simulated time: the store's own code."""

from __future__ import annotations

from pathlib import Path

from simulate_batch import Simulation


def test_no_job_is_lost_or_recorded_twice(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, jobs=60, workers=6, minutes=20.0, risk=0.3, seed=3)
    took, found = simulation.run(), simulation.found
    states = [job.status for job in simulation.workers[0].store.read_jobs()]
    assert states == ["done"] * 60
    assert set(found.ended.values()) == {1}
    assert found.deaths > 3
    assert found.frozen > 3
    assert found.late > 0, "a machine that hung for long came back to a job of another one"
    # List scheduling: no machine is idle while a job waits, but for deaths and the time until they are noticed.
    idle = (found.deaths * 12 + found.frozen * 15) * 60.0
    assert took <= (found.trained_seconds + idle) / 6 + max(simulation.seconds.values()) + 15 * 60.0
