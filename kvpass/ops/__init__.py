"""Operators ``kvpass::*``: schemas, the eager reference, and the CPU and CUDA implementations."""
