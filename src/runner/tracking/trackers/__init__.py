"""Trackers such as MLflow and Weights & Biases, fed by another process from the files of a run."""
