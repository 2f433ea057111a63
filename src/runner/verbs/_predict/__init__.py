"""The work of `predict`: which images, what is said of each, and the files that it is written to."""
