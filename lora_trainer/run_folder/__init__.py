"""The folder of a run: the names of its files, who trains in it, and how far the run is. No torch."""
