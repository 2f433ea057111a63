"""Run the same steps twice, or under two settings, and name the first tensor that differs; also of two checkpoints."""
