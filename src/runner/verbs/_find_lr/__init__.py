"""The work of `find-lr`: the range test, what it suggests, and what is written."""
