"""Single checkpoints in the original layout: recognized by their keys and laid out as a folder of diffusers, without torch."""
