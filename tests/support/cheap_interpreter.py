"""Triton's interpreter without what it does again for every function and every sum of a kernel."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from triton.runtime import interpreter


def cheap_interpreter() -> None:
    """Leave out what takes half of the time of an interpreted kernel."""
    # In each call inside a kernel it looks through all of triton.language for what to put its own functions in place
    # of: once for each file of kernels is enough, until it puts back what was there, at the end of the launch.
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[int] = set()

    def patch_once(function: Callable[..., Any]) -> Any:
        file = id(function.__globals__)
        if file in patched:
            return None  # a call inside a kernel does not look at it
        patched.add(file)
        return patch(function)

    @functools.wraps(launch)
    def launch_anew(self: Any, *args: Any, **options: Any) -> Any:
        patched.clear()
        return launch(self, *args, **options)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, launch_anew
    # For each sum, difference and product of integers it finds out whether they fit, and asks nobody to know it
    # unless TRITON_DEBUG is set for a device.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
