"""Passes that verify what a graph takes for granted."""
