"""Prove what an attention call makes of the products of queries and keys, by giving it products.

Logits must be a multiple of the product (or its soft-capping), the same for every entry, and hidden where the causal
mask, or that of one sliding window, hides. They are taken for what they do: the graph from the products to the logits
runs on chosen products, so any order of scaling, capping and masking is understood, and nothing else is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpass.graphs.prove_causal import NEGLIGIBLE_LOGIT, Band, NotCausalError, prove_band, starts_of
from kvpass.graphs.prove_causal import band as causal_band

_LARGE = 1e6
_TOLERANCE = 2e-6
_MAX_EXAMPLE = 2**24
"""Products of the largest example that has all rows and heads."""

Logits = Callable[[int, int, Tensor], Tensor]
"""From token symbol, first position and products ``[..., T, T]`` to the logits."""


@dataclass(frozen=True)
class LogitRule:
    """``logits = softcap * tanh(scale * product / softcap)``, plus what the mask does."""

    scale: float
    softcap: float | None
    band: Band

    def logits(self, product: Tensor) -> Tensor:
        """Logits before the mask."""
        scaled = product * self.scale
        return scaled if self.softcap is None else self.softcap * torch.tanh(scaled / self.softcap)


def prove_logits(
    logits: Logits,
    lengths: list[int],
    count: Callable[[int], int],
    product_shape: Callable[[int], tuple[int, ...]],
    heads: int,
    name: str,
    like: Tensor,
) -> LogitRule:
    """Scale, soft-capping and mask of an attention call.

    Args:
        lengths: values of the token symbol to try, the longest first; it decides the window.
        count: tokens at such a value. product_shape: shape of the products there. heads: query heads.
        name: of the node, for messages. like: the recorded products.
    Raises:
        NotCausalError: with the reason.
    """
    floor = max(NEGLIGIBLE_LOGIT, torch.finfo(like.dtype).min)

    def run(length: int, start: int, products: Tensor) -> Tensor:
        result = logits(length, start, products)
        if not result.is_floating_point():
            raise NotCausalError(f"its logits have dtype {result.dtype}")
        return result

    def full(length: int, fill: float) -> Tensor:
        return torch.full((), fill, dtype=torch.float64, device=like.device).expand(product_shape(length))

    def mask(length: int, start: int) -> Tensor:
        zeros = full(length, 0.0)
        if zeros.numel() > _MAX_EXAMPLE:  # of all rows and heads one
            zeros = zeros[(slice(0, 1),) * (zeros.ndim - 2)]
        return run(length, start, zeros)

    band = prove_band(mask, lengths, count, heads, name, floor)
    rule: LogitRule | None = None
    for length in lengths[1:] or lengths:
        for start in starts_of(length):
            grid = _grid(full(length, 0.0))
            nothing = run(length, start, full(length, 0.0)).reshape(grid.shape)
            if rule is None:
                one, most = (run(length, start, full(length, fill)).flatten()[0] for fill in (1.0, _LARGE))
                rule = _rule_of(float(one - nothing.flatten()[0]), float(most - nothing.flatten()[0]), band)
            got = run(length, start, grid).reshape(grid.shape)
            seen = causal_band(grid.shape[-1], band.window, got.device).expand(got.shape)
            expected = (rule.logits(grid) + nothing).to(got.dtype)
            tolerance = max(_TOLERANCE, 4 * torch.finfo(got.dtype).eps)
            close = torch.isclose(got, expected, rtol=tolerance, atol=tolerance * max(abs(rule.scale), 1e-3))
            if not bool(close[seen].all()) or not bool((got[~seen] <= floor / 2).all()):
                raise NotCausalError(f"its logits {name} are not a multiple of query times key, or its soft-capping")
    assert rule is not None
    return rule


def snap(value: float, head_dim: int) -> float:
    """The exact number that a scale rounded to fp32 stands for, where that is plain."""
    for exact in (1.0, head_dim**-0.5):
        if math.isclose(value, exact, rel_tol=_TOLERANCE):
            return exact
    return value


def _rule_of(one: float, most: float, band: Band) -> LogitRule:
    """Scale and soft-capping from what a product of 1 and a large one add to the logits."""
    if not (math.isfinite(one) and math.isfinite(most) and one > 0 and most > 0):
        raise NotCausalError(f"its logits are {one} and {most} for products of 1 and {_LARGE:g}")
    if math.isclose(most, one * _LARGE, rel_tol=1e-3):
        return LogitRule(one, None, band)
    if one >= most:
        raise NotCausalError(f"its logits do not grow with the product: {one} for 1, {most} for {_LARGE:g}")
    return LogitRule(most * math.atanh(one / most), most, band)


def _grid(like: Tensor) -> Tensor:
    """Products of both signs from 1e-3 to 1e4."""
    generator = torch.Generator().manual_seed(0)
    exponent = torch.rand(like.shape, generator=generator, dtype=torch.float64) * 7 - 3
    sign = torch.randint(0, 2, like.shape, generator=generator) * 2 - 1
    return (sign * 10.0**exponent).to(like)
