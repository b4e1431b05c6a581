"""Attention implementations: which work here, which is quickest."""
