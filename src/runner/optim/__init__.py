"""Optimizers, learning-rate schedules and losses: how the weights are moved, and towards what."""
