"""What of the denoiser stands on the card and when: checkpointing, streaming, ledgers."""
