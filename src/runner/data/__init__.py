"""Data sets, sample order, randomness per sample, loaders and transforms."""
