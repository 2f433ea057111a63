"""`export`: a checkpoint in other formats, compared with the model."""
