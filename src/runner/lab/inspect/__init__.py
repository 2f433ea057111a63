"""Inspect a model: layers, parameters, FLOPs, activations, gradients, features and wrong samples."""
