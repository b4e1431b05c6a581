"""The adapter that is trained: put into the model, its fp32 masters, and their moving average."""
