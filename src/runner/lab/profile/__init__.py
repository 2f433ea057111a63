"""Profile training steps: where the time and the memory go, and which key to try first."""
