"""Base models: families, their parts, the files that hold them."""
