"""Passes that find attention and replace it by the canonical ``kvpass::site``."""
