"""What a step holds in memory: predicted by tracing, and made to fit while it runs."""
