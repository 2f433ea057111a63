"""Data and models of `scripts/equal_loops.py`."""
