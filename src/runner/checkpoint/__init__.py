"""Checkpoints: their contents, and how they are written, kept, found and read."""
