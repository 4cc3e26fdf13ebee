"""Changes to the copy of a model before it is captured, each for models of one kind."""
