"""The phases of a training step by name, and the files of a profile. No torch."""

from __future__ import annotations

PROFILE, PHASES, OPERATORS = "profile", "phases.json", "operators.json"  # the folder in a run's, and files in it
BETWEEN_STEPS = ("validation", "checkpoint", "samples")  # no part of a step
PREPARE = "prepare_data"  # in its own thread
