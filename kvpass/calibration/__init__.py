"""Fits the maps of policy ``kvzap`` for a model, on texts."""
