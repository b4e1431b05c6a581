"""The phase of a run, by the last file that it touched."""

from __future__ import annotations

PARTS = (
    ("/checkpoints", "checkpoint"),
    ("/cache/latents", "caching"),
    ("/cache/texts", "caching"),
    ("/logs", "step"),
    ("metrics", "step"),
    ("validation", "step"),
    (".safetensors", "export"),
    ("/samples", "export"),
)
PHASES = ("caching", "step", "checkpoint", "export")


def phase_of(operation: str) -> str:
    """One of PHASES, or `between`: reading, loading, recording."""
    return next((phase for part, phase in PARTS if part in operation), "between")
