"""Let objects be copied, but raise when they are pickled."""

from __future__ import annotations

import pickle
from typing import Any


class _Anew:
    """Makes the empty object that ``copy`` fills; raises when pickled, before the object's content is."""

    def __init__(self, refusal: str) -> None:
        self.refusal = refusal

    def __call__(self, kind: Any) -> Any:
        return kind.__new__(kind)

    def __reduce__(self) -> Any:
        raise pickle.PicklingError(self.refusal)


def forbid_pickling(value: Any, refusal: str) -> tuple[_Anew, tuple[type], Any]:
    """Return a ``__reduce_ex__`` value with which ``copy`` and ``deepcopy`` work and ``pickle`` raises.

    Args:
        refusal: the message of the ``pickle.PicklingError``.
    """
    return _Anew(refusal), (type(value),), value.__getstate__()
