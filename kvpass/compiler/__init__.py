"""Compile captured graphs, and run calls on a cache."""
