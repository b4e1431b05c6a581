"""The server of the page and its REST under `/api` (`lora-trainer ui`). Loads no torch."""
