"""The built-in model: its text, its training."""
