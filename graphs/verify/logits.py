"""Prove what an attention call computes from products of queries and keys.

Logits must be a multiple of the product (or its soft-capping), the same for every entry, and hidden where the causal
mask, or one of a sliding window, hides. The graph from products to logits runs on chosen products, so any order of
scaling, capping and masking is recognised. Anything else raises.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kvpass.graphs.verify.causal_mask import NEGLIGIBLE_LOGIT, Band, prove_band, starts_of
from kvpass.graphs.verify.causal_mask import band as causal_band
from kvpass.graphs.verify.example_lengths import Lengths, NotCausalError

_LARGE = 1e6
_TOLERANCE = 2e-6
_MAX_EXAMPLE = 2**24
"""Most products in an example that has all rows and heads at once."""

Logits = Callable[[int, int, Tensor, tuple[int, ...]], Tensor]
"""Maps to logits: token symbol, first position, products ``[..., T, T]``, their first index on leading axes."""


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
    logits: Logits,
    lengths: Lengths,
    count: Callable[[int], int],
    product_shape: Callable[[int], tuple[int, ...]],
    heads: int,
    name: str,
    like: Tensor,
    *,
    indexed: bool = False,
) -> LogitRule:
    """Return scale, soft-capping and mask of an attention call.

    Args:
        lengths: values of the token symbol to try.
        count: tokens at such a value. product_shape: shape of the products there. heads: query heads.
        name: of the node, for messages. like: the recorded products.
        indexed: whether ``logits`` gets row and head of a product as an index. If not, masks by head broadcast to the
            products, and products of one head show all masks.
    Raises:
        NotCausalError: with the reason.
    """
    floor = max(NEGLIGIBLE_LOGIT, torch.finfo(like.dtype).min)

    def full(length: int, fill: float) -> Tensor:
        return torch.full((), fill, dtype=torch.float64, device=like.device).expand(product_shape(length))

    def run(length: int, start: int, products: Tensor, at: tuple[int, ...]) -> Tensor:
        result = logits(length, start, products, at)
        if not result.is_floating_point():
            raise NotCausalError(f"its logits have dtype {result.dtype}")
        return result

    def mask(at: tuple[int, ...], length: int, start: int) -> Tensor:
        at = at if math.prod(product_shape(length)) > _MAX_EXAMPLE else ()
        return run(length, start, _part(full(length, 0.0), at), at)

    parts = _parts(product_shape(max(lengths.longest)))
    parts = parts if indexed else parts[:1]
    found = [prove_band(partial(mask, at), lengths, count, heads, name, floor) for at in parts]
    band, longest = found[0][0], min(length for _, length in found)
    if len(parts) > 1 and any(other.slopes is not None or other.window != band.window for other, _ in found):
        raise NotCausalError("its mask is another one for other heads or rows")
    rule: LogitRule | None = None
    for length in (*lengths.short, longest):
        at = parts[0] if math.prod(product_shape(length)) > _MAX_EXAMPLE else ()
        for start in starts_of(length):
            zeros = _part(full(length, 0.0), at)
            rule = _check_rule(partial(run, length, start), zeros, at, rule, band, name, floor)
    assert rule is not None
    return rule


def _check_rule(
    logits: Callable[[Tensor, tuple[int, ...]], Tensor],
    zeros: Tensor,
    at: tuple[int, ...],
    rule: LogitRule | None,
    band: Band,
    name: str,
    floor: float,
) -> LogitRule:
    """Return the rule that the logits follow; ``rule`` when it is already known.

    Raises:
        NotCausalError: they follow none.
    """
    grid = _grid(zeros)
    nothing = _as(logits(zeros, at), grid)
    if rule is None:
        one, most = (logits(torch.full_like(zeros, fill), at).flatten()[0] for fill in (1.0, _LARGE))
        rule = _rule_of(float(one - nothing.flatten()[0]), float(most - nothing.flatten()[0]), band)
    got = _as(logits(grid, at), grid)
    seen = causal_band(grid.shape[-1], band.window, got.device).expand(got.shape)
    without_mask = rule.logits(grid)
    expected = (without_mask + nothing).to(got.dtype)
    tolerance = max(_TOLERANCE, 4 * torch.finfo(got.dtype).eps)
    size = without_mask.abs() + nothing.abs() + max(abs(rule.scale), 1e-3)  # their sum may be small
    close = (got == expected) | ((got - expected).abs() <= tolerance * size)
    if not bool(close[seen].all()) or not bool((got[~seen] <= floor / 2).all()):
        raise NotCausalError(f"its logits {name} are not a multiple of query times key, or its soft-capping")
    return rule


def _parts(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return first indices of parts of such products on the leading axes.

    One part if the products fit in an example, else one per row and head.
    """
    if math.prod(shape) <= _MAX_EXAMPLE:
        return [()]
    return list(itertools.product(*(range(size) for size in shape[:-2])))


def _part(products: Tensor, at: tuple[int, ...]) -> Tensor:
    for axis, index in enumerate(at):
        products = products.narrow(axis, index, 1)
    return products


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
    exponent = torch.rand(like.shape, generator=generator, dtype=torch.float64) * 7 - 3
    sign = torch.randint(0, 2, like.shape, generator=generator) * 2 - 1
    return (sign * 10.0**exponent).to(like)
