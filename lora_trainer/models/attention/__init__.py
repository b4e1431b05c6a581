"""Attention backends: which work here, which is fastest."""
