"""Where models come in: transformers, and modules of any make."""
