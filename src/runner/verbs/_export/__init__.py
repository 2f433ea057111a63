"""The work of `export`: the formats, and how each is compared with the model."""
