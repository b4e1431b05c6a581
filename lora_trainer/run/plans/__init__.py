"""Memory, disk, steps and time, predicted."""
