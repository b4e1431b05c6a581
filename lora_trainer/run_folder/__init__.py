"""The folder of a run: who trains in it, how far the run is, and its record. No torch."""
