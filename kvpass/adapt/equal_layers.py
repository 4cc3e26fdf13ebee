"""Layers of equal code: a capture traces one of them, and repeats its graph for the others."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from kvpass.adapt.changed_class import changed_class, once
from kvpass.torch_compat import REPEATS_LAYERS
from kvpass.tracing import repeats_layers


def repeat_layers(model: nn.Module) -> None:
    """Let captures of a compiled copy trace its layers of one class once, where their forwards are alike."""
    for module in model.modules() if REPEATS_LAYERS else ():
        if isinstance(module, GradientCheckpointingLayer):
            module.__class__ = _repeated(type(module))


@once
def _repeated(kind: type[nn.Module]) -> Any:
    @torch.compiler.nested_compile_region(max_reuse_entries=2**31)
    def region(self: Any, names: str, *values: Any) -> Any:
        """Call a layer with its arguments one by one: Dynamo compares those of two calls much faster than nested ones.

        names: of the arguments, ``""`` for one by position; before those of a tuple, the name begins with its size.
        """
        rest, args, kwargs = list(values), [], {}
        for text in names.split(","):
            size, _, name = text.rpartition("*")
            value = rest.pop(0) if size == "" else tuple([rest.pop(0) for _ in range(int(size))])
            if name:
                kwargs[name] = value
            else:
                args.append(value)
        return kind.forward(self, *args, **kwargs)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not repeats_layers():
            return kind.forward(self, *args, **kwargs)
        names: list[str] = []
        values: list[Any] = []
        for name, value in [*(("", value) for value in args), *kwargs.items()]:
            if isinstance(value, tuple):
                name = f"{len(value)}*{name}"
            names.append(name)
            values += value if isinstance(value, tuple) else [value]
        return region(self, ",".join(names), *values)

    return changed_class(kind, forward=forward)
