"""The command ``kvpass``."""
