"""What of the denoiser stands on the GPU and when: checkpointing, streaming, ledgers."""
