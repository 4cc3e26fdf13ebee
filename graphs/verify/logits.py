"""Prove what an attention call computes from products of queries and keys.

Logits must be a multiple of the product (or its soft-capping), the same for every entry, and hidden where the causal
mask, or one of a sliding window, hides. The graph from products to logits runs on chosen products, so any order of
scaling, capping and masking is recognised. Anything else raises.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kvpass.graphs.verify.causal_mask import NEGLIGIBLE_LOGIT, Band, MaskPart, prove_band, starts_of
from kvpass.graphs.verify.causal_mask import band as causal_band
from kvpass.graphs.verify.examples import NotCausalError

_LARGE = 1e6
_TOLERANCE = 2e-6
Logits = Callable[[int, int, Tensor], Tensor]
"""Maps to logits: token symbol, first position, products ``[..., T, T]``."""


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


def prove_logits(
    part: MaskPart, logits: Logits, product_shape: Callable[[int], tuple[int, ...]], heads: int, like: Tensor
) -> LogitRule:
    """Return scale, soft-capping and mask of an attention call.

    Args:
        part: of the logits. product_shape: shape of the products at a value of the token symbol. heads: query heads.
        like: the recorded products.
    Raises:
        NotCausalError: with the reason.
    """
    floor = max(NEGLIGIBLE_LOGIT, torch.finfo(like.dtype).min)

    def zeros(length: int) -> Tensor:
        return torch.zeros((), dtype=torch.float64, device=like.device).expand(product_shape(length))

    def run(length: int, start: int, products: Tensor) -> Tensor:
        result = logits(length, start, products)
        if not result.is_floating_point():
            raise NotCausalError(f"its logits have dtype {result.dtype}")
        return result

    def mask(length: int, start: int) -> Tensor:
        return run(length, start, zeros(length))

    band, longest = prove_band(part, mask, heads, floor)
    rule: LogitRule | None = None
    for length in (*part.lengths.short, longest):
        for start in starts_of(length):
            rule = _check_rule(partial(run, length, start), zeros(length), rule, band, part.name, floor)
    assert rule is not None
    return rule


def _check_rule(
    logits: Callable[[Tensor], Tensor], zeros: Tensor, rule: LogitRule | None, band: Band, name: str, floor: float
) -> LogitRule:
    """Return the rule that the logits follow; ``rule`` when it is already known.

    Raises:
        NotCausalError: they follow none.
    """
    grid = _grid(zeros)
    nothing = _as(logits(zeros), grid)
    if rule is None:
        one, most = (logits(torch.full_like(zeros, fill)).flatten()[0] for fill in (1.0, _LARGE))
        rule = _rule_of(float(one - nothing.flatten()[0]), float(most - nothing.flatten()[0]), band)
    got = _as(logits(grid), grid)
    seen = causal_band(grid.shape[-1], band.window, got.device).expand(got.shape)
    without_mask = rule.logits(grid)
    expected = (without_mask + nothing).to(got.dtype)
    tolerance = max(_TOLERANCE, 4 * torch.finfo(got.dtype).eps)
    size = without_mask.abs() + nothing.abs() + max(abs(rule.scale), 1e-3)  # their sum may be small
    close = (got == expected) | ((got - expected).abs() <= tolerance * size)
    if not bool(close[seen].all()) or not bool((got[~seen] <= floor / 2).all()):
        raise NotCausalError(f"its logits {name} are not a multiple of query times key, or its soft-capping")
    return rule


def _as(logits: Tensor, products: Tensor) -> Tensor:
    """Reshape logits like the products, unless a mask gives them more leading axes."""
    return logits.reshape(products.shape) if logits.numel() == products.numel() else logits


def snap(value: float, head_dim: int) -> float:
    """Return the exact scale that was rounded to fp32 (1 or ``head_dim**-0.5``), else ``value``."""
    for exact in (1.0, head_dim**-0.5):
        if math.isclose(value, exact, rel_tol=_TOLERANCE):
            return exact
    return value


def _rule_of(one: float, most: float, band: Band) -> LogitRule:
    """Return scale and soft-capping from the logits of products 1 and ``_LARGE``."""
    if not (math.isfinite(one) and math.isfinite(most) and one > 0 and most > 0):
        raise NotCausalError(f"its logits are {one} and {most} for products of 1 and {_LARGE:g}")
    if math.isclose(most, one * _LARGE, rel_tol=1e-3):
        return LogitRule(one, None, band)
    if one >= most:
        raise NotCausalError(f"its logits do not grow with the product: {one} for 1, {most} for {_LARGE:g}")
    return LogitRule(most * math.atanh(one / most), most, band)


def _grid(like: Tensor) -> Tensor:
    """Return random products of both signs from 1e-3 to 1e4."""
    generator = torch.Generator().manual_seed(0)
    exponent = torch.rand(like.shape, generator=generator, dtype=torch.float64, device="cpu") * 7 - 3
    sign = torch.randint(0, 2, like.shape, generator=generator, device="cpu") * 2 - 1
    return (sign * 10.0**exponent).to(like)
