"""Errors, files, signals and other things that every folder uses; imports nothing of the rest."""
