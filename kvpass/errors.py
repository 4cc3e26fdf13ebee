"""Exceptions of kvpass that callers may want to distinguish; other bad arguments raise ``ValueError``."""


class UnsupportedAttentionError(ValueError):
    """An attention op of the traced model is not supported, so nothing was compressed.

    The message names the module path, the graph node, its line of code if known, and the reason.
    """

    def __init__(self, module_path: str, node: str, reason: str, line: str = "") -> None:
        place = f"node {node}, {line}" if line else f"node {node}"
        super().__init__(f"cannot compress attention in {module_path or '<root>'} ({place}): {reason}")
        self.module_path = module_path
        self.node = node
        self.reason = reason
        self.line = line


class CacheMismatchError(ValueError):
    """A cache does not belong to this model, batch or position; the cache is unchanged."""


class CacheFileError(ValueError):
    """A file does not hold a usable cache: damaged, truncated, too new, or not a cache file."""

    def __init__(self, path: object, reason: str) -> None:
        super().__init__(f"{path} {reason}")
        self.path = path
        self.reason = reason
