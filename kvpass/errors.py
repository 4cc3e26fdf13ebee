"""Exceptions of kvpass. Bad arguments raise ``ValueError``; these add what a caller may want to tell apart."""


class UnsupportedAttentionError(ValueError):
    """An attention call of the traced decoder is not understood, so nothing was compressed.

    The message names the module path, the graph node, the line of code that it stands for where that is known, and the
    reason.
    """

    def __init__(self, module_path: str, node: str, reason: str, line: str = "") -> None:
        place = f"node {node}, {line}" if line else f"node {node}"
        super().__init__(f"cannot compress attention in {module_path or '<root>'} ({place}): {reason}")
        self.module_path = module_path
        self.node = node
        self.reason = reason
        self.line = line


class CacheMismatchError(ValueError):
    """A cache was handed to a model, batch or position that it does not belong to; the cache is unchanged."""


class CacheFileError(ValueError):
    """A file does not hold a usable cache: damaged, truncated, too new, or something else altogether."""

    def __init__(self, path: object, reason: str) -> None:
        super().__init__(f"{path} {reason}")
        self.path = path
        self.reason = reason
