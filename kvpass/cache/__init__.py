"""The compressed cache: its buffers, its user interface, its files."""
