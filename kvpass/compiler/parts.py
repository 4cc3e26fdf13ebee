"""Compile a graph in parts: each distinct part once, called with the parameters of each layer.

Inductor may add guards after Dynamo has written its own: :func:`compile_guarded` checks them in each call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from kvpass.graphs.bind_state import placeholders
from kvpass.graphs.fx_utils import recorded, storage_of
from kvpass.graphs.split import Part, join, split_graph

Regions = Literal["auto"] | bool
"""Whether what continues a cache is compiled in parts; "auto" decides by phase, number of layers and device."""
REGIONS: tuple[Regions, ...] = (True, False, "auto")

CompileOne = Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]
"""Compiles a graph for these fake inputs."""

FEW_LAYERS = 8
"""Up to so many layers a decode step on the CPU is compiled whole: to call a part takes tens of microseconds."""


def compile_parts(gm: GraphModule, examples: Sequence[Any], compile_one: CompileOne) -> tuple[Callable[..., Any], int]:
    """Compile a rewritten graph in parts, for fake inputs; return what runs the whole, and how many were compiled."""
    pieces = split_graph(gm)
    parts = [piece for piece in pieces if isinstance(piece, Part)]
    functions = compile_distinct(gm, parts, examples, compile_one)
    return join(gm, pieces, functions).forward, len(functions)


def compile_distinct(
    gm: GraphModule, parts: Sequence[Part], examples: Sequence[Any], compile_one: CompileOne
) -> dict[Hashable, Callable[..., Any]]:
    """Compile each distinct part of a graph that runs; return the functions by key."""
    given = dict(zip(placeholders(gm), examples, strict=True))
    functions: dict[Hashable, Callable[..., Any]] = {}
    for part in parts:
        if part.runs and part.key not in functions:
            functions[part.key] = _ours(compile_one(part.gm, _inputs(part, given)))
    return functions


def _inputs(part: Part, given: Mapping[Node, Any]) -> list[Any]:
    """Fake inputs of a part: those given, or recorded values, which two nodes may have in common."""
    found: list[Any] = []
    held = {given[node].untyped_storage()._cdata for node in part.inputs if isinstance(given.get(node), Tensor)}
    for node in part.inputs:
        value = given.get(node, recorded(node))
        if node not in given and isinstance(value, Tensor):
            if storage_of(node) in held:
                with value.fake_mode:  # type: ignore[attr-defined]
                    value = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
            held.add(storage_of(node))
        found.append(value)
    return found


def _ours(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, by a name that FX can write into code."""

    def part(*inputs: Any) -> Any:
        return compiled(*inputs)

    return part


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
