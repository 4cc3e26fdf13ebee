"""The name that :mod:`kvpass.cache.cache_file` had: programs that read and write cache files import it."""

from kvpass.cache.cache_file import read_cache_file, write_cache_file

__all__ = ["read_cache_file", "write_cache_file"]
