"""What modules of a compiled copy do while kvpass captures them, and only then.

Called alone (``model.model(...)``, a reward head around the body), they compute what the user's own modules do.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import PreTrainedConfig

from kvpass.compiler.capture import capturing
from kvpass.frontends.attention import ATTENTION_NAME

if TYPE_CHECKING:
    _Base = PreTrainedConfig
else:
    _Base = object


class _CapturedConfig(_Base):
    """Base class before a configuration's own class: names kvpass's attention to captures, the user's to others."""

    @property
    def _attn_implementation(self) -> Any:
        return ATTENTION_NAME if capturing() else self._attn_implementation_internal

    @_attn_implementation.setter
    def _attn_implementation(self, value: Any) -> None:
        PreTrainedConfig._attn_implementation.fset(self, value)  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = memo[id(self)] = object.__new__(type(self))
        vars(twin).update(copy.deepcopy(vars(self), memo))
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain, (type(self).__mro__[2], vars(self))  # pickle finds a class by its name


def _plain(kind: type[PreTrainedConfig], settings: dict[str, Any]) -> PreTrainedConfig:
    config = object.__new__(kind)
    vars(config).update(settings)
    return config


_KINDS: dict[type, type] = {}
"""Classes of configurations, and ours of the same names."""


def attend_in_captures(model: nn.Module) -> None:
    """Let the configurations of a compiled copy name kvpass's attention to captures."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        kind: Any = type(config)
        if issubclass(kind, PreTrainedConfig) and not issubclass(kind, _CapturedConfig):
            own = {"__module__": kind.__module__, "__doc__": kind.__doc__}
            config.__class__ = _KINDS.setdefault(kind, type(kind.__name__, (_CapturedConfig, kind), own))
