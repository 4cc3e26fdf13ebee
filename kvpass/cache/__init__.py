"""The compressed cache: buffers, what a user reads of it, files."""
