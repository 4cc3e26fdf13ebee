"""From a captured graph to compiled callables, and how a call runs on a cache."""
