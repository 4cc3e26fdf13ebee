"""Operators ``kvpass::*``: schemas, the eager reference, and what CUDA runs."""
