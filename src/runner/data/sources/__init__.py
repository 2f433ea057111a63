"""Data sets: where samples come from."""
