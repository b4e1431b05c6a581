"""How frozen weights are stored and brought into memory."""
