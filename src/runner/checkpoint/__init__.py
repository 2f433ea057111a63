"""What is saved, how it is written, kept, found and read."""
