"""The memory that a run needs, predicted before anything is loaded: profiles, traces, and the plan that fits."""
