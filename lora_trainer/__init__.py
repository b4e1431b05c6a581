"""Train LoRAs for diffusion models, with proof that they learned."""

__version__ = "0.1.0"
