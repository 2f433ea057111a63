"""The checks: a function with the decorator `check` is one, wherever it stands in this folder."""
