"""The runner of graph passes, which knows nothing of any pass.

A pass is a function ``verb_object_pass(gm) -> int`` that changes a Dynamo graph in place and says how many sites (or
places) it changed, or that only checks it and says 0; its settings are bound with ``functools.partial`` where the list
is built (``kvpass.compiler.backend``). In order:

==========================  =====================================================================================
``specialize_attributes``   attributes of modules that Dynamo made symbolic -> numbers
``check_own_state``         fail closed: the decoder writes into tensors of its own, as into a cache
``find_attention``          raw ``scaled_dot_product_attention`` calls proved causal -> ``kvpass::site``
``find_flash_attention``    calls of the flash-attn library -> ``kvpass::site``
``find_flex_attention``     FlexAttention proved causal -> ``kvpass::site``
``find_eager_attention``    matmul, softmax, matmul proved to be causal attention -> ``kvpass::site``
``strip_repeat_kv``         K and V of a site before they were repeated to the query heads
``fold_alibi``              logits that grow with the position of the key -> columns of queries and keys
``check_no_raw_attention``  fail closed: attention or other token mixing that is no site
``self_check``              fail closed: a text in pieces is not the whole text; marks positions that the decoder counts
``check_sites``             fail closed: no site, refused sites, mixed dtypes, layers without a site
``offset_positions``        extend and decode: marked positions go on from the tokens seen
``one_token``               decode: values recorded anew for one token
``decompose_linear``        decode of one row on the CPU: matrix-vector products -> reductions that Inductor fuses
``rewrite_prefill``         ``kvpass::site`` -> prefill ops with the cascade
``rewrite_cached``          ``kvpass::site`` -> attention against the cache
``rewrite_evicting``        the same for a policy that evicts while decoding
==========================  =====================================================================================
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch.fx import GraphModule

from kvpass.graphs.dump import count_ops, diff_ops, dump_artifact

log = logging.getLogger(__name__)

GraphPass = Callable[[GraphModule], int]


@dataclass(frozen=True, kw_only=True)
class PassRecord:
    """What one pass did: changed sites, wall seconds, difference in op counts."""

    name: str
    sites: int
    seconds: float
    op_diff: str


def pass_name(graph_pass: GraphPass) -> str:
    """``find_attention`` for ``find_attention_pass`` or a partial of it."""
    function = graph_pass.func if isinstance(graph_pass, partial) else graph_pass
    return function.__name__.removesuffix("_pass")


def run_passes(gm: GraphModule, passes: Sequence[GraphPass], *, label: str) -> list[PassRecord]:
    """Apply ``passes`` in order, lint after each, dump before/after graphs as ``<label>.<i>.<pass>.before|after``."""
    records = []
    text = partial(gm.print_readable, print_output=False)
    before = count_ops(gm)
    for index, graph_pass in enumerate(passes):
        name = pass_name(graph_pass)
        artifact = f"{label}.{index}.{name}"
        dump_artifact(f"{artifact}.before", text)
        began = time.perf_counter()
        sites = graph_pass(gm)
        gm.graph.lint()
        seconds = time.perf_counter() - began
        after = count_ops(gm)
        op_diff, before = diff_ops(before, after), after
        dump_artifact(f"{artifact}.after", text)
        dump_artifact(f"{artifact}.ops", partial(str, op_diff))
        log.info("%s: %d sites changed in %.3f s", artifact, sites, seconds)
        records.append(PassRecord(name=name, sites=sites, seconds=seconds, op_diff=op_diff))
    gm.recompile()
    return records
