"""What is kept of one layer of a prompt, for ``plan`` and for engines that run the layers: the program's operators."""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from kvpass.operands import NO_POLICY_INPUTS, Attention, Candidates, PolicyInputs, PrefillBuffers
from kvpass.policies.base import Policy
from kvpass.ranks import ONE_PROCESS, Ranks


def compress_layer(
    ops: ModuleType,
    call: Attention,
    lse: Tensor | None,
    start: Tensor,
    first: Tensor,
    layer: int,
    policy: Policy,
    buffers: PrefillBuffers,
    ranks: Ranks,
    policy_inputs: PolicyInputs = NO_POLICY_INPUTS,
) -> Tensor:
    """Score the entries of a layer; keep those that the policy chooses among them and the ones kept of earlier layers.

    After the last layer, ``ops.pack`` brings what was kept into its order.

    Args:
        ops: the implementation, :mod:`kvpass.ops.reference` or :mod:`kvpass.ops.cuda`. call, lse, start, first, layer,
            ranks: as in :func:`kvpass.ops.reference.score_layer`. buffers: of all layers; what is kept goes there.
            policy_inputs: as there, but for entries and rule_rows, which are those of the buffers.
    Returns:
        scores of all heads, fp32 ``[B, K, N]``, ``-inf`` in padding and window.
    """
    asked = policy_inputs._replace(entries=buffers.entries, rule_rows=buffers.rule_rows, protected=buffers.protected)
    layers = buffers.layer_weights.shape[1]
    scores, stats, weight = ops.score_layer(call, lse, start, first, layer, layers, policy, asked, ranks)
    keep_entries(ops, buffers, Candidates(call.k, call.v, scores, stats, weight, first), layer, policy, ranks)
    return scores


def keep_entries(
    ops: ModuleType,
    buffers: PrefillBuffers,
    candidates: Candidates,
    layer: int,
    policy: Policy,
    ranks: Ranks = ONE_PROCESS,
) -> None:
    """Keep the entries of a layer that the policy chooses, once they are scored."""
    scores, weight, first = candidates.scores, candidates.weight, candidates.start
    # also where a program has fixed shares, or none: those do not change from layer to layer, so no layer gives any up
    shares = ops.cascade_step(buffers, scores, weight, first, layer, policy, ranks)
    ops.gather_layer(buffers, candidates.stored_in(buffers), shares, None, layer, policy, ranks)
