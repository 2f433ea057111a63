"""Sweeps: several runs from one command, the ledger that lets the same command continue, and their table."""
