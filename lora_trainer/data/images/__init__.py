"""Image files: opened safely, read in parallel, measured, turned into pixels."""
