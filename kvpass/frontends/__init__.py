"""Frontends: transformers models, and any other PyTorch modules."""
