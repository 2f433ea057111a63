"""Schemas, composition, validation and messages: what a run is asked to do."""
