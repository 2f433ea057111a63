"""The work of `check`: one function a check, in the file of its group."""
