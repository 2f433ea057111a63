"""Tasks: how targets, outputs and metrics relate, a file each."""
