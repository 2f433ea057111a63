"""Launchers that Hydra finds by the name of this package; `runner.sweeps` has what they do."""
