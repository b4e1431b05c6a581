"""The trained adapter: its kinds, its fp32 masters, and their EMA."""
