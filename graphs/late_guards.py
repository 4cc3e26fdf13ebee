"""Check guards that Inductor adds after Dynamo has written its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv


def compile_guarded(compile: Callable[[], Any], examples: Sequence[Any], shapes: ShapeEnv | None) -> Callable[..., Any]:
    """Return the result of ``compile``, wrapped to check guards on sizes that compiling added.

    Args:
        examples: fake inputs of the compiled function, sizes among them. shapes: defines the symbols of their sizes.
    Raises:
        ValueError: by the returned function before it runs, when the sizes do not meet these guards.
    """
    if shapes is None or not shapes.frozen:
        return compile()
    known = len(shapes.guards)
    compiled = compile()
    late = shapes.guards[known:]
    symbolic = [index for index, example in enumerate(examples) if _is_symbolic(example)]
    expression = late and shapes.produce_guards_expression([examples[index] for index in symbolic], guards=late)
    if not expression:
        return compiled
    assumed = " and ".join(str(guard.expr) for guard in late)

    def checked(*inputs: Any) -> Any:
        if not shapes.evaluate_guards_expression(expression, [inputs[index] for index in symbolic]):
            raise ValueError(
                f"sizes of this call do not meet what was compiled for, {assumed}: capture the decoder for them too "
                "(torch.compile with dynamic=False captures every size, but of dimensions marked as dynamic)"
            )
        return compiled(*inputs)

    return checked


def _is_symbolic(example: Any) -> bool:
    if isinstance(example, Tensor):
        return any(isinstance(size, torch.SymInt) for size in (*example.shape, *example.stride()))
    return isinstance(example, torch.SymInt)
