"""What policies need to know of a model, from texts."""
