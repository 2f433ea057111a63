"""The work of `profile`: steps measured in phases, what came out, and what to make of it."""
