"""Runs that are listed before they begin: the jobs of a batch, their store, its workers and the summary."""
