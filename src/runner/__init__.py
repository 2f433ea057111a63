"""`runner` trains PyTorch vision models from the command line: `python -m runner train`."""

__version__ = "0.1.0"
