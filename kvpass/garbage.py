"""No search for garbage while much is made and little of it is garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Search for no reference cycles inside, in any thread.

    Imports of torch and captures by Dynamo make millions of objects that stay: to search them again and again takes a
    fifth of their time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
