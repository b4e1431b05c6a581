"""Encoded images and captions on disk: planned, filled by many at once, read, kept under a limit."""
