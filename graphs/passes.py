"""All graph passes, in the order in which they run.

A pass is a function ``verb_object_pass(gm) -> int`` that changes an FX graph in place and returns how many attention
ops (or nodes) it changed. Passes that only check return 0. Settings are bound with ``functools.partial``.
``KVPASS_DUMP=folder`` writes the graph before and after each pass. ``KVPASS_DISABLE_PASSES=name,...`` skips passes (not
``inline_layers``), to find a faulty one; results may then be wrong. docs/add-a-pass.md says how to write one.

:func:`capture_passes`, once on each graph that Dynamo captures:

==========================  =====================================================================================
``inline_layers``           a layer that Dynamo traced once and repeats -> its calls, in each place
``specialize_attributes``   attributes of modules and int arguments that Dynamo made symbolic -> numbers
``check_own_state``         raise: the decoder writes into its own tensors, for example a cache
``find_attention``          ``scaled_dot_product_attention`` calls proved causal -> ``kvpass::site``
``find_flash_attention``    calls of the flash-attn library -> ``kvpass::site``
``find_eager_attention``    matmul, softmax, matmul proved to be causal attention -> ``kvpass::site``
``strip_repeat_kv``         repeated K and V of an attention op -> K and V before the repeat
``check_no_raw_attention``  raise: attention or other token mixing outside of ``kvpass::site``
``self_check``              raise: a text in pieces is not the whole text; marks positions that the decoder counts
``fold_alibi``              logits that grow with the position of the key -> columns of queries and keys
``check_sites``             raise: no attention op, unsupported ops, mixed dtypes, layers without an op
==========================  =====================================================================================

:func:`prompt_passes`, on a copy for prompts, which :mod:`~kvpass.graphs.split_layers` then cuts into layers; and
:func:`program_passes`, on each program that :mod:`~kvpass.graphs.prompt_program` writes of these layers:

==========================  =====================================================================================
``offset_positions``        marked positions start at the number of tokens seen: at each block of the prompt
``keep_logits``             ``logits_to_keep``: logits of all tokens -> those of the last ones
yours                       :data:`PROGRAM_PASSES`
==========================  =====================================================================================

:func:`part_passes`, on each part of a layer, before it is compiled:

==========================  =====================================================================================
``widen_linear``            16-bit products on a CPU without instructions for them -> in fp32; int8 weights -> converted
==========================  =====================================================================================

:func:`step_passes`, on a copy for each phase that continues a cache:

==========================  =====================================================================================
``offset_positions``        marked positions start at the number of tokens in the cache
``keep_logits``             as above
``one_token``               of a decode step: values recorded again for one token
``rewrite_cached``          ``kvpass::site`` -> attention against the cache, for policies that append or evict
``decompose_linear``        decode of one row on the CPU: matrix-vector products -> reductions that Inductor fuses
``widen_linear``            as above
==========================  =====================================================================================
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch.fx import GraphModule, Node

from kvpass.graphs.canonical import check_sites_pass
from kvpass.graphs.decompose_linear import decompose_linear_pass
from kvpass.graphs.find.alibi import fold_alibi_pass
from kvpass.graphs.find.eager import find_eager_attention_pass
from kvpass.graphs.find.flash import find_flash_attention_pass
from kvpass.graphs.find.repeat_kv import strip_repeat_kv_pass
from kvpass.graphs.find.sdpa import find_attention_pass
from kvpass.graphs.inline_layers import DistinctLayers
from kvpass.graphs.keep_logits import keep_logits_pass
from kvpass.graphs.one_token import one_token_pass
from kvpass.graphs.rewrite_attention import rewrite_cached_pass
from kvpass.graphs.specialize_attributes import specialize_attributes_pass
from kvpass.graphs.verify.no_raw_attention import check_no_raw_attention_pass
from kvpass.graphs.verify.offset_positions import offset_positions_pass
from kvpass.graphs.verify.own_state import check_own_state_pass
from kvpass.graphs.verify.self_check import self_check_pass
from kvpass.graphs.widen_linear import widen_linear_pass
from kvpass.torch_compat import trace_structured

log = logging.getLogger(__name__)

DISABLE = "KVPASS_DISABLE_PASSES"
DUMP = "KVPASS_DUMP"

GraphPass = Callable[[GraphModule], int]

FINDING_PASSES = (
    specialize_attributes_pass,
    check_own_state_pass,
    find_attention_pass,
    find_flash_attention_pass,
    find_eager_attention_pass,
    strip_repeat_kv_pass,
    check_no_raw_attention_pass,
)
"""After these passes every attention call is a ``kvpass::site``."""

CANONICAL_PASSES = (*FINDING_PASSES, self_check_pass, fold_alibi_pass)

PROGRAM_PASSES: list[GraphPass] = []
"""Your passes over the programs of prompts; append them before the first prompt."""

_STEP_PASSES = (
    offset_positions_pass,
    keep_logits_pass,
    one_token_pass,
    rewrite_cached_pass,
    decompose_linear_pass,
    widen_linear_pass,
)


def capture_passes(inline: GraphPass, layers: int | None, distinct: DistinctLayers | None) -> list[GraphPass]:
    """Return the passes over a Dynamo capture.

    Args:
        inline: ``inline_layers`` with its settings. layers: attention layers of the model; None when unknown.
        distinct: the capture without layers that repeat another one, after ``FINDING_PASSES``.
    """
    check = partial(self_check_pass, distinct=distinct)
    return [inline, *FINDING_PASSES, check, fold_alibi_pass, partial(check_sites_pass, expected=layers)]


def prompt_passes(seen: Node, logits: int) -> list[GraphPass]:
    """Return the passes over a copy of a capture for prompts.

    Args:
        seen: the input from which positions are counted. logits: of so many last tokens; 0: of all.
    """
    positions: GraphPass = partial(offset_positions_pass, seen=seen)
    return [positions, partial(keep_logits_pass, logits=logits)] if logits else [positions]


def program_passes() -> list[GraphPass]:
    """Return the passes over the program of a prompt."""
    return [*PROGRAM_PASSES]


def part_passes() -> list[GraphPass]:
    """Return the passes over a part of a layer of a prompt."""
    return [widen_linear_pass]


def step_passes(
    seen: Node, logits: int, rewrite: GraphPass, one_token: GraphPass | None, *, decomposes: bool
) -> list[GraphPass]:
    """Return the passes over a copy of a capture for calls that continue a cache: first those of a prompt.

    Args:
        seen: the input that is the number of tokens in the cache. logits: of so many last tokens; 0: of all.
        rewrite, one_token: ``rewrite_cached`` and ``one_token`` with their settings; None where the call has several
            tokens.
    """
    one_token_only = [] if one_token is None else [one_token]
    decompose = [decompose_linear_pass] if decomposes else []
    return [*prompt_passes(seen, logits), *one_token_only, rewrite, *decompose, widen_linear_pass]


@dataclass(frozen=True, kw_only=True)
class PassRecord:
    """What a pass did: changed attention ops, wall seconds, changed counts: ``kvpass.site.default: 4 -> 0 (-4)``."""

    name: str
    sites: int
    seconds: float
    op_diff: str


def pass_name(graph_pass: Callable[..., int]) -> str:
    """Return ``find_attention`` for ``find_attention_pass`` or a partial of it."""
    function = graph_pass.func if isinstance(graph_pass, partial) else graph_pass
    return function.__name__.removesuffix("_pass")


def run_passes(gm: GraphModule, passes: Sequence[GraphPass], *, label: str) -> list[PassRecord]:
    """Apply ``passes`` in order, with a lint after each change; dump graphs as ``<label>.<ii>.<pass>.before|after``."""
    records = []
    disabled = _disabled()
    before = _count_ops(gm)
    for index, graph_pass in enumerate(passes):
        name = pass_name(graph_pass)
        if name in disabled:
            continue
        artifact = f"{label}.{index:02d}.{name}"  # sorts in a folder
        dump_graph(f"{artifact}.before", gm)
        began = time.perf_counter()
        sites = graph_pass(gm)
        after = _count_ops(gm)
        if sites or after != before:
            gm.graph.lint()
        seconds = time.perf_counter() - began
        changed = (name for name in sorted(before | after) if before[name] != after[name])
        op_diff = "\n".join(
            f"{name}: {before[name]} -> {after[name]} ({after[name] - before[name]:+d})" for name in changed
        )
        before = after
        dump_graph(f"{artifact}.after", gm)
        _dump_artifact(f"{artifact}.ops", partial(str, op_diff))
        log.info("%s: %d sites changed in %.3f s", artifact, sites, seconds)
        records.append(PassRecord(name=name, sites=sites, seconds=seconds, op_diff=op_diff))
    gm.recompile()
    return records


def dump_graph(name: str, gm: GraphModule) -> None:
    """Dump a graph as ``<name>``, as :func:`run_passes` does."""
    _dump_artifact(name, partial(gm.print_readable, print_output=False))


def _disabled() -> set[str]:
    """Return the names of passes that the user disabled; raise ValueError if there is no such pass."""
    names = {name for name in os.environ.get(DISABLE, "").split(",") if name}
    passes: list[Callable[..., int]] = [*CANONICAL_PASSES, check_sites_pass, *_STEP_PASSES, *PROGRAM_PASSES]
    choices = set(map(pass_name, passes))
    if names - choices:
        raise ValueError(f"{DISABLE}: {sorted(names - choices)} are no passes, which are {sorted(choices)}")
    if names:
        warnings.warn(f"{DISABLE}: without {sorted(names)} results may be wrong", stacklevel=2)
    return names


def _count_ops(gm: GraphModule) -> Counter[str]:
    return Counter(str(node.target) for node in gm.graph.nodes if node.op.startswith("call_"))


def _dump_artifact(name: str, text: Callable[[], str]) -> None:
    """Write a text, which is made if needed, to the structured trace, and to a file if ``KVPASS_DUMP`` is set."""
    trace_structured("artifact", metadata_fn=lambda: {"name": f"kvpass.{name}", "encoding": "string"}, payload_fn=text)
    folder = os.environ.get(DUMP)
    if folder:
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        (path / f"{name}.txt").write_text(text() + "\n")
