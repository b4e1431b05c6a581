"""Train LoRAs for diffusion models, and score the dataset and the LoRA of every run."""

__version__ = "0.1.0"
