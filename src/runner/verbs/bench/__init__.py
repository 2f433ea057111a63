"""Compare the toggles for speed and memory on this machine; `bench data` compares input and compute."""
