"""A tensor subclass that wraps another tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map


class HalfPrecision(Tensor):
    """A weight that wraps another, as quantised ones do, and has no data of its own."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    wrapped: Tensor

    @staticmethod
    def __new__(cls: Any, inner: Tensor) -> Any:
        made = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32, device=inner.device)
        made.wrapped = inner
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["wrapped"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], *_: Any) -> Any:
        return cls(inner["wrapped"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any, kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return return_and_correct_aliasing(function, args, kwargs, cls(function(args[0].wrapped)))
        if function is torch.ops.aten.view.default:
            raise NotImplementedError("as torchao's")
        return function(*tree_map(lambda x: x.wrapped.float() if isinstance(x, cls) else x, args), **kwargs)
