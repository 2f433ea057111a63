"""Trackers, MLflow and Weights & Biases: a thread of the run sends them what is in `metrics.jsonl`."""
