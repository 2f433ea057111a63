"""Predict the classes of images: files, folders or a split, written as CSV or JSON lines."""
