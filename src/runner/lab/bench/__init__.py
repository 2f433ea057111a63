"""Compare the toggles for speed and memory on this machine."""
