"""Passes that find attention calls and replace them by ``kvpass::site``."""
