"""What a LoRA is trained towards beside the plain target: each wraps the step's target when the step is built."""
