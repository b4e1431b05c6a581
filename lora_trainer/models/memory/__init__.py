"""Memory of the denoiser: gradient checkpointing, block swap, activation offload, memory profiles."""
