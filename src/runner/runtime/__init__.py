"""The device of a run and its settings: device, precision, determinism, compilation, signals."""
