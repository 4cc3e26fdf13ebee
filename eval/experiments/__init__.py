"""Experiments on the built-in model."""
