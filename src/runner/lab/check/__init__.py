"""Find common mistakes in data, model, loss and loop before a run: pass, warn or fail, with evidence and fix."""
