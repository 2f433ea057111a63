"""The contenders of `benchmark_peers.py`: the same work, one file for each way to do it."""
