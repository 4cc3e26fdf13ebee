"""Insert a ``kvpass::site`` for an attention call."""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule, Node

from kvpass.graphs.fx_utils import recorded
from kvpass.graphs.rewrite_attention import SITE
from kvpass.graphs.verify.logits import LogitRule

SLOPES = "kvpass_slopes"
"""Key in the meta of an attention op: its ALiBi slopes, until ``fold_alibi`` has run."""


def emit_site(gm: GraphModule, call: Node, q: Node, k: Node, v: Node, rule: LogitRule) -> Node:
    """Insert an attention op for ``call`` at the graph's insertion point.

    Args:
        q: ``[B, H, T, D]``. k, v: ``[B, K, T, D]``.
    """
    options: dict[str, Any] = {"sliding_window": rule.band.window, "softcap": rule.softcap}
    given = {name: value for name, value in options.items() if value is not None}
    site = gm.graph.call_function(SITE, (q, k, v, rule.scale), given)
    b, h, t, _ = recorded(q).shape
    example = recorded(q).new_empty(b, t, h, recorded(v).shape[3]).transpose(1, 2)
    site.meta = {"example_value": example, SLOPES: rule.band.slopes}
    for name in ("nn_module_stack", "stack_trace"):
        site.meta[name] = call.meta.get(name)
    return site
