"""What people keep images in, one file a format. The door is `data/manifest.py:read_manifest`."""
