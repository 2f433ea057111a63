"""The parts of a run that come from the config and the data together, for `train` and every verb that has a model."""
