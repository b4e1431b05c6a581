"""A measured checklist of this machine, of the run that a config describes, and of a run that is training or has ended."""
