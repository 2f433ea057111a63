"""Starting and supervising processes."""
