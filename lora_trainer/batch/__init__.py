"""Many datasets, one run each: the queue, its workers, and the summary."""
