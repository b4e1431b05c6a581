"""Measurements of the whole: memory, batches, resolutions, processes, claims, and the table of a GPU."""
