"""Quantization of frozen weights, and loading them."""
