"""The work of `audit`: apart from the verb because it imports torch."""
