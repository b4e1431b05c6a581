"""Readers of image sources, one file a format. Call them through `data/manifest.py:read_manifest`."""
