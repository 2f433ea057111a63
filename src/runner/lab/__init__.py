"""Tools that look at models, data and runs; only verbs import them."""
