"""The work of `inspect`: what a model is made of, what it computes on a batch, and where it is wrong."""
