"""Schemas, composition, validation and messages: what a run is told to do."""
