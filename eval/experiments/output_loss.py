"""Layer attention output loss of policies (LAVa, arXiv 2509.09754, Lemma 1 and Table 14).

The loss is that of the first token after compression: the prompt is compressed without its last token, whose query then
attends to what was kept and to itself. Every layer is looked at alone, with queries, keys and values of a full cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvpass.eval.policy_spec import PolicySpec
from kvpass.policies.loss import attention_output_loss
from kvpass.policies.plan import plan

_NAME = "kvpass-recording"

Layer = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class PolicyLoss:
    """Losses of one policy at one budget, fp64 ``[prompts, layers]``."""

    policy: str
    budget: float
    losses: Tensor

    @property
    def by_layer(self) -> Tensor:
        """Mean over prompts, ``[layers]``."""
        return self.losses.mean(0)

    def less_than(self, other: PolicyLoss) -> tuple[float, float, float]:
        """Difference to another policy on the same prompts, summed over layers.

        Returns:
            mean difference, half of its 95 % interval (normal), and share of prompts on which this one loses less.
        """
        difference = (other.losses - self.losses).sum(1)
        half = 1.96 * difference.std(correction=1) / math.sqrt(difference.numel())
        return float(difference.mean()), float(half), float((difference > 0).double().mean())


@torch.inference_mode()
def measure_output_loss(
    model: PreTrainedModel, prompts: Sequence[Tensor], policies: Sequence[PolicySpec], budgets: Sequence[float]
) -> Iterator[PolicyLoss]:
    """Losses of every policy at every budget.

    Args:
        model: whose attention goes through transformers' attention interface, with ``self_attn.o_proj`` in every
            layer of ``model.model.layers``. It is left as it was.
        prompts: token ids, int64 ``[1, N]``. budgets: fractions of the compressed part.
    Raises:
        ValueError: a budget below the window of a policy, a policy that keeps nothing of a head, or one that reads the
            rotary embedding or replays.
    """
    weights = [layer.self_attn.o_proj.weight for layer in model.model.layers]
    recorded = [record_attention(model, ids) for ids in prompts]
    for budget in budgets:
        for policy in policies:
            losses = [_losses(layers, weights, policy, budget) for layers in recorded]
            yield PolicyLoss(str(policy), budget, torch.stack(losses))


def record_attention(model: PreTrainedModel, ids: Tensor) -> list[Layer]:
    """Rotated queries ``[1, H, N, D]``, keys, values ``[1, K, N, D]`` of each layer."""
    layers: list[Layer] = []
    plain = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def record(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> Any:
        layers.append((query, key, value))
        return plain(module, query, key, value, mask, **options)

    before = model.config._attn_implementation
    AttentionInterface.register(_NAME, record)
    model.set_attn_implementation(_NAME)
    try:
        model(ids, use_cache=False, logits_to_keep=1)
    finally:
        model.set_attn_implementation(before)
    return layers


def _losses(layers: Sequence[Layer], weights: Sequence[Tensor], policy: PolicySpec, budget: float) -> Tensor:
    """Loss of each layer, fp64 ``[L]``."""
    queries, keys, values = (list(column) for column in zip(*layers, strict=True))
    kept = plan(
        policy.resolve(),
        [q[:, :, :-1] for q in queries],
        [k[:, :, :-1] for k in keys],
        [v[:, :, :-1] for v in values],
        budget=budget,
        output_weights=weights,
    ).keep
    keep = pad(kept, (0, 1), value=True)
    return attention_output_loss(queries, keys, values, keep, weights).loss[:, 0]
