"""Predict the memory that a run needs before anything is loaded: profiles, traces, and the plan that fits."""
