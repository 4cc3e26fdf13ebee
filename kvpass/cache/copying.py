"""Objects that can be copied but not pickled, and that say so."""

from __future__ import annotations

import pickle
from typing import Any


class _Anew:
    """Makes the empty object that ``copy`` fills; raises when it is pickled, before anything of the object is."""

    def __init__(self, refusal: str) -> None:
        self.refusal = refusal

    def __call__(self, kind: Any) -> Any:
        return kind.__new__(kind)

    def __reduce__(self) -> Any:
        raise pickle.PicklingError(self.refusal)


def copied_only(value: Any, refusal: str) -> tuple[_Anew, tuple[type], Any]:
    """What ``value.__reduce_ex__`` returns so that ``copy`` and ``deepcopy`` work as ever and ``pickle`` raises.

    Args:
        refusal: the message of the ``pickle.PicklingError``.
    """
    return _Anew(refusal), (type(value),), value.__getstate__()
