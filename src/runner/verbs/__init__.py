"""The verbs: `_table.py` lists them; each is a module or folder named after it."""
