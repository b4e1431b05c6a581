"""What `--model` names becomes a folder in diffusers' layout."""
