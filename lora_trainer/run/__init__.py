"""Whole runs: from settings and images to an evaluated LoRA. `from lora_trainer import ProductionTrainer` is the way in."""
