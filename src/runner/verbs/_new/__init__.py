"""The work of `new`: templates, and where their files go."""
