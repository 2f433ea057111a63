"""Run the same steps twice, or with two settings, and name the first tensor that differs; also of two checkpoints."""
