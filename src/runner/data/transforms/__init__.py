"""Augmentation: what happens to a sample or a batch before the model sees it."""
