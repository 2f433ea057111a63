"""What a run runs on: device, precision, determinism, compilation, signals."""
