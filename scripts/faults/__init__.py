"""What `scripts/torture.py` does to runs: one module a section, and what they share."""
