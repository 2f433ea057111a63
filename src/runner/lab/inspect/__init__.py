"""Inspect a model: layers, parameters, FLOPs, weights, activations, gradients, features; tables and pictures."""
