"""What is kept of a run: taken, written in the background, read again."""
