"""What captures of several tokens have shown of a module, for its captures of one token, which show too little."""

from __future__ import annotations

from collections import defaultdict
from typing import Generic, TypeVar

from torch import nn
from torch.fx import Node
from torch.utils.weak import WeakTensorKeyDictionary

from kvpass.graphs.fx_utils import module_tensor

Finding = TypeVar("Finding")


class Shown(Generic[Finding]):
    """Findings by module and place. The module is known by its first parameter, and forgotten with it."""

    def __init__(self) -> None:
        self._of_modules = WeakTensorKeyDictionary()
        self._of_others: dict[str, list[Finding]] = defaultdict(list)

    def at(self, node: Node, place: str) -> list[Finding]:
        """The list, to be appended to, of what was found at a place of the module in whose graph the node is.

        Modules without a parameter share theirs.
        """
        gm = node.graph.owning_module
        assert gm is not None
        tensors = (module_tensor(gm, found) for found in gm.graph.nodes if found.op in ("placeholder", "get_attr"))
        owner = next((tensor for tensor in tensors if isinstance(tensor, nn.Parameter)), None)
        if owner is None:
            return self._of_others[place]
        return self._of_modules.setdefault(owner, defaultdict(list))[place]
