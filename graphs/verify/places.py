"""Fail closed on what a token is given for its place in a call, as the first or the last.

Against a cache every call has a first and a last token; in one text there is one of each. The graph runs on tokens that
are all the same, at the same position: all of them must bring the same to the sites and to the output.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from kvpass.graphs.fx_utils import DataFlow, refuse, shape_of
from kvpass.graphs.rewrite_attention import find_sites
from kvpass.graphs.verify.apart import ApartExample
from kvpass.graphs.verify.examples import EvaluationError
from kvpass.graphs.verify.offset_positions import marked_operands
from kvpass.graphs.verify.token_mixing import mixing_lengths

_TOLERANCE = 1e-4
"""Of the largest number a call gives: rounding differs between the rows of a matrix product."""


def check_places_pass(gm: GraphModule) -> int:
    """Refuse a graph in which tokens are told apart by their place in the call; changes nothing.

    Positions marked by ``check_positions`` are no such places: they go on from the tokens seen.

    Raises:
        UnsupportedAttentionError: naming the first call that gives such tokens something of their own.
    """
    sites = find_sites(gm)
    shape = shape_of(sites[0].q) if sites else None
    if shape is None or shape[2] == 1:
        return 0
    flow = DataFlow(gm)
    live = flow.sources([gm.graph.output_node()])
    counted = marked_operands(gm)
    for length in mixing_lengths(gm, live, shape[2]):
        try:
            culprit = _Alike(ApartExample(gm, flow, live, shape[0], shape[2], length), counted).culprit()
        except EvaluationError as error:
            reason = f"no example shows whether tokens are told apart by their place in a call: {error}"
            raise refuse(sites[0].node, reason) from error
        if culprit is not None:
            reason = (
                f"its result {shape_of(culprit) or ''} depends on a token's place in the input, as the first or the "
                "last; against a cache every call has a first and a last token"
            )
            raise refuse(culprit, reason)
    return 0


class _Alike:
    """A run in which all tokens are the same and at the same position."""

    def __init__(self, example: ApartExample, counted: Collection[Node]) -> None:
        self.example, self.counted = example, counted
        self.found: Node | None = None

    def culprit(self) -> Node | None:
        """The first call that does not give all tokens the same, None when all do."""
        for node, value in self.example.run_alike(self._after):
            self._check(node, value)
        return self.found

    def _after(self, node: Node, value: Any) -> Any:
        if isinstance(value, Tensor):
            if node in self.counted:
                return self._of_one_token(node, value)
            self._check(node, value)
        return value

    def _of_one_token(self, node: Node, value: Tensor) -> Tensor:
        for view, axis in self.example.by_token(node, value):
            value = view.narrow(axis, 0, 1).expand_as(view).reshape(value.shape)
        return value.contiguous()

    def _check(self, node: Node, value: Tensor) -> None:
        """Compare the tokens, then give all of them what the first has, so that rounding does not grow."""
        views = list(self.example.by_token(node, value))
        if self.found or node not in self.example.fed or not value.is_floating_point() or len(views) != 1:
            return
        view, axis = views[0]
        first = view.narrow(axis, 0, 1).expand_as(view).clone()
        if torch.equal(view, first):
            return
        scale = float(view.abs().nan_to_num(nan=0.0, posinf=0.0).max())
        tolerance = max(_TOLERANCE, 4 * torch.finfo(value.dtype).eps) * scale
        if not torch.allclose(view.double(), first.double(), rtol=0.0, atol=tolerance, equal_nan=True):
            self.found = node
        elif 0 not in view.stride():
            view.copy_(first)
