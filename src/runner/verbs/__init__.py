"""One file per verb. Each has a docstring whose first line is its help, and `main(argv) -> exit status`."""
