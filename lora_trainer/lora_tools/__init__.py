"""Tools for LoRA files of any program: merge, resize, extract, average."""
