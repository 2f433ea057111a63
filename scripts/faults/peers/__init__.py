"""Small trainings by other libraries, each as its documentation writes it, for `scripts/torture_peers.py`."""
