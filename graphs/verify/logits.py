"""Prove what written-out attention computes from products of queries and keys.

Logits must be a multiple of the product (or its soft-capping), the same for every entry, and hidden where the causal
mask, or one of a sliding window, hides. The weights must be their softmax. The graph from products to weights runs on
chosen products, so any order of scaling, capping and masking is recognised. Anything else raises.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from kvpass.graphs.fx_utils import recorded, shape_of
from kvpass.graphs.verify.causal_mask import NEGLIGIBLE_LOGIT, Band, MaskPart, band, prove_band, starts_of
from kvpass.graphs.verify.examples import NotCausalError, concrete, random_like

_LARGE = 1e6
_TOLERANCE = 2e-6
_MAX_PRODUCTS = 2**24  # most products in an example that has all rows and heads at once


@dataclass(frozen=True)
class LogitRule:
    """``logits = softcap * tanh(scale * product / softcap)``, plus the mask."""

    scale: float
    softcap: float | None
    band: Band

    def logits(self, product: Tensor) -> Tensor:
        """Return the logits before the mask."""
        scaled = product * self.scale
        return scaled if self.softcap is None else self.softcap * torch.tanh(scaled / self.softcap)


def prove_logits(part: MaskPart, weights: MaskPart, scores: Node, heads: int) -> LogitRule:
    """Return scale, soft-capping and mask of an attention call; raise NotCausalError where there are none.

    Args:
        part: of the logits. weights: of what the values are multiplied with. scores: the products, ``[..., T, T]``.
        heads: query heads.
    """
    like = recorded(scores)
    floor = max(NEGLIGIBLE_LOGIT, torch.finfo(like.dtype).min)

    def zeros(length: int) -> Tensor:
        *lead, rows, columns = concrete(shape_of(scores), part.sizes(length))
        if math.prod((*lead, rows, columns)) > _MAX_PRODUCTS:
            lead = [1] * len(lead)  # masks by head broadcast to the products, and one head of those shows all masks
        return torch.zeros((), dtype=torch.float64, device=like.device).expand(*lead, rows, columns)

    def logits(length: int, start: int, products: Tensor) -> Tensor:
        result = part.run(length, start, {scores: products})
        if not result.is_floating_point():
            raise NotCausalError(f"its logits have dtype {result.dtype}")
        return result

    def mask(length: int, start: int) -> Tensor:
        return logits(length, start, zeros(length))

    hidden, lengths = prove_band(part, mask, heads, floor)
    rule: LogitRule | None = None
    for length in lengths:
        for start in starts_of(length):
            nothing, grid = mask(length, start), random_like(zeros(length), {})
            if rule is None:
                filled = (logits(length, start, torch.full_like(grid, fill)) for fill in (1.0, _LARGE))
                one, most = (float(value.flatten()[0] - nothing.flatten()[0]) for value in filled)
                rule = _rule_of(one, most, hidden)
            _check_logits(rule, grid, logits(length, start, grid), nothing, floor, part.name)
            if length < lengths[-1] or len(lengths) == 1:
                generator = torch.Generator().manual_seed(1)
                normal = torch.randn(grid.shape, generator=generator, dtype=grid.dtype, device="cpu")
                products = normal.to(like.device) * 3 / rule.scale
                got = weights.run(length, start, {scores: products})
                _check_softmax(rule, products, got, nothing, weights.name)
    part.check_content(lengths[0], {scores: zeros(lengths[0])})
    assert rule is not None
    return rule


def _check_logits(rule: LogitRule, products: Tensor, got: Tensor, nothing: Tensor, floor: float, name: str) -> None:
    """Raise unless logits ``got`` for some products, and ``nothing`` for products of zero, follow the rule."""
    got, nothing = _as(got, products), _as(nothing, products)
    seen = band(products.shape[-1], rule.band.window, got.device).expand(got.shape)
    without_mask = rule.logits(products)
    expected = (without_mask + nothing).to(got.dtype)
    tolerance = max(_TOLERANCE, 4 * torch.finfo(got.dtype).eps)
    size = without_mask.abs() + nothing.abs() + max(abs(rule.scale), 1e-3)  # their sum may be small
    close = (got == expected) | ((got - expected).abs() <= tolerance * size)
    if not bool(close[seen].all()) or not bool((got[~seen] <= floor / 2).all()):
        raise NotCausalError(f"its logits {name} are not a multiple of query times key, or its soft-capping")


def _check_softmax(rule: LogitRule, products: Tensor, got: Tensor, nothing: Tensor, name: str) -> None:
    """Raise unless the weights ``got`` for some products are the softmax of the logits, without dropout."""
    expected = (rule.logits(products) + _as(nothing, products)).softmax(-1)
    tolerance = max(_TOLERANCE, 4 * torch.finfo(got.dtype).eps) if got.is_floating_point() else 0.0
    if got.numel() != expected.numel() or not torch.allclose(
        got.double().reshape(expected.shape), expected, rtol=0.0, atol=tolerance
    ):
        raise NotCausalError(f"its weights {name} are not the softmax of its logits (dropout, sinks?)")


def _as(logits: Tensor, products: Tensor) -> Tensor:
    """Reshape logits like the products, unless a mask gives them more leading axes."""
    return logits.reshape(products.shape) if logits.numel() == products.numel() else logits


def snap(value: float, head_dim: int) -> float:
    """Return the exact scale that was rounded to fp32 (1 or ``head_dim**-0.5``), else ``value``."""
    return next((exact for exact in (1.0, head_dim**-0.5) if math.isclose(value, exact, rel_tol=_TOLERANCE)), value)


def _rule_of(one: float, most: float, band: Band) -> LogitRule:
    """Return scale and soft-capping from the logits of products 1 and ``_LARGE``."""
    if not (math.isfinite(one) and math.isfinite(most) and one > 0 and most > 0):
        raise NotCausalError(f"its logits are {one} and {most} for products of 1 and {_LARGE:g}")
    if math.isclose(most, one * _LARGE, rel_tol=1e-3):
        return LogitRule(one, None, band)
    if one >= most:
        raise NotCausalError(f"its logits do not grow with the product: {one} for 1, {most} for {_LARGE:g}")
    return LogitRule(most * math.atanh(one / most), most, band)
