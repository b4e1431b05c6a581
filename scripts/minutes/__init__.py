"""The parts of `scripts/gpu_minutes.py`: what is measured, in what order and time, and the pages that are written from it."""
