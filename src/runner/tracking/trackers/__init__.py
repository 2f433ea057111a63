"""Trackers such as MLflow and Weights & Biases, fed from the files of a run by a process of their own."""
