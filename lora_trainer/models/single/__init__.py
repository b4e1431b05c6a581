"""Single-file checkpoints in the original layout: recognized by their keys and laid out as a diffusers folder. No torch."""
