"""Studies over runs: hyperparameter search and the learning-rate range test."""
