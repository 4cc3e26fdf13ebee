"""Masks are proved causal by what they do; whatever differs from a causal or banded mask is refused.

All masks of a table are captured as one graph of as many attention calls, since a capture is what takes time.
"""

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional as F

from kvpass.graphs.canonical import find_sites
from kvpass.graphs.find.sdpa import find_attention_pass

HEADS, TOKENS, DIM = 2, 11, 4


def causal(t: int) -> Tensor:
    return torch.ones(t, t, dtype=torch.bool).tril()


def rows_and_columns(t: int) -> tuple[Tensor, Tensor]:
    order = torch.arange(t)
    return order[:, None], order[None, :]


def additive(allowed: Tensor, hidden: float) -> Tensor:
    return torch.zeros(allowed.shape).masked_fill(~allowed, hidden)


def in_place_through_a_view(t: int) -> Tensor:
    mask = torch.zeros(1, t, t)
    mask[0].add_(torch.full((t, t), -torch.inf).triu(1))
    return mask


def by_out(t: int) -> Tensor:
    mask = torch.ones(t, t, dtype=torch.bool)
    torch.logical_and(mask, causal(t), out=mask)
    return mask


def shifted(t: int, by: int) -> Tensor:
    rows, columns = rows_and_columns(t)
    return columns <= rows + by


def with_window(t: int, window: int) -> Tensor:
    rows, columns = rows_and_columns(t)
    return (columns <= rows) & (columns > rows - window)


def distance(t: int) -> Tensor:
    rows, columns = rows_and_columns(t)
    return rows - columns


def hide_column(mask: Tensor, column: int) -> Tensor:
    mask[:, column] = False
    mask[:, 0] = True
    return mask


def same_document(t: int, p: Tensor) -> Tensor:
    document = p - torch.arange(t)
    return (document[:, None, :] == document[:, :, None])[:, None] & causal(t)


class Stored(nn.Module):
    """Masks kept by a module: a buffer, a plain attribute, and numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("causal", torch.ones(64, 64, dtype=torch.bool).tril())
        self.register_buffer("prefix", torch.ones(64, 64, dtype=torch.bool).tril() | (torch.arange(64) < 30))
        self.register_buffer("forty", torch.tensor(40))
        self.register_buffer("limit", torch.tensor(450.0))
        self.register_buffer("by_head", torch.tensor([20, 700]))
        self.band = torch.ones(64, 64, dtype=torch.bool).tril().triu(-40)


Mask = Callable[[Stored, int, Tensor], Tensor]  # of the module, the token count and the positions [B, T]

CAUSAL: dict[str, Mask] = {
    "tril": lambda m, t, p: causal(t),
    "expanded over the batch": lambda m, t, p: causal(t).expand(p.shape[0], 1, t, t),
    "minus infinity": lambda m, t, p: torch.full((t, t), -torch.inf).triu(1),
    "large number": lambda m, t, p: additive(causal(t), -1e9),
    "compared indices": lambda m, t, p: shifted(t, 0),
    "compared positions": lambda m, t, p: (p[:, None, :] <= p[:, :, None])[:, None],
    "same document": lambda m, t, p: same_document(t, p),
    "stored": lambda m, t, p: m.causal[:t, :t],
    "written through a view": lambda m, t, p: in_place_through_a_view(t),
    "written by out": lambda m, t, p: by_out(t),
    "made like another tensor": lambda m, t, p: p.new_ones(t, t).tril().bool(),
}

BANDED: dict[str, tuple[int, Mask]] = {
    "1": (1, lambda m, t, p: with_window(t, 1)),
    "700": (700, lambda m, t, p: with_window(t, 700)),
    "by triu": (9, lambda m, t, p: causal(t).triu(-8)),
    "on positions": (
        6,
        lambda m, t, p: ((p[:, None, :] <= p[:, :, None]) & (p[:, :, None] - p[:, None, :] < 6))[:, None],
    ),
    "a float": (512, lambda m, t, p: causal(t) & (distance(t).float() < 512.0)),
    "a fill value": (300, lambda m, t, p: causal(t) & (distance(t) < torch.full((), 300))),
    "a stored float": (450, lambda m, t, p: causal(t) & (distance(t) < m.limit)),
    "halved distances": (512, lambda m, t, p: causal(t) & (distance(t) // 2 < 256)),
    "stored": (41, lambda m, t, p: m.band[:t, :t]),
    "stored number": (40, lambda m, t, p: causal(t) & (rows_and_columns(t)[0] - rows_and_columns(t)[1] < m.forty)),
}

REFUSED: dict[str, tuple[str, Mask]] = {
    "nothing hidden": ("not causal", lambda m, t, p: torch.ones(t, t, dtype=torch.bool)),
    "everything hidden": ("not causal", lambda m, t, p: torch.full((t, t), -torch.inf)),
    "one token ahead": ("not causal", lambda m, t, p: shifted(t, 1)),
    "one token late": ("not causal", lambda m, t, p: shifted(t, -1)),
    "prefix of four": ("not causal", lambda m, t, p: causal(t) | (torch.arange(t) < 4)),
    "first token beside window 5": (
        "not causal",
        lambda m, t, p: with_window(t, 5) | (causal(t) & (torch.arange(t) == 0)),
    ),
    "one column hidden in place": ("not causal", lambda m, t, p: hide_column(causal(t), 2)),
    "one head sees all": ("not causal", lambda m, t, p: causal(t)[None] | (torch.arange(HEADS) == 1)[:, None, None]),
    "one row sees all": (
        "not causal",
        lambda m, t, p: causal(t)[None, None] | (torch.arange(p.shape[0]) == p.shape[0] - 1)[:, None, None, None],
    ),
    "other at other lengths": ("not causal", lambda m, t, p: causal(t).tril(7 - t)),
    "positions against indices": (
        "not causal",
        lambda m, t, p: (p[:, None, :] <= torch.arange(t)[None, :, None])[:, None],
    ),
    **{
        f"position {n} hidden": ("not causal", lambda m, t, p, n=n: causal(t) & (p != n)[:, None, None, :])
        for n in (0, 40)
    },
    "one stored position hidden": ("not causal", lambda m, t, p: causal(t) & (p != m.forty)[:, None, None, :]),
    "a window per head": ("not causal", lambda m, t, p: causal(t) & (distance(t) < m.by_head[:, None, None])),
    "chunks of 64, eight of them": (
        "not causal",
        lambda m, t, p: causal(t) & (torch.arange(t)[:, None] // 64 - torch.arange(t) // 64 < 8),
    ),
    "distances shrunk too far": ("1024005 tokens", lambda m, t, p: causal(t) & (distance(t) // 1000 < 1024)),
    "a bias far away": ("adds a bias", lambda m, t, p: additive(causal(t), -torch.inf) - (distance(t) - 600.0).relu()),
    "padding only": ("not causal", lambda m, t, p: (p >= 0)[:, None, None, :].expand(-1, -1, t, -1)),
    "stored prefix": ("not causal", lambda m, t, p: m.prefix[:t, :t]),
    "distance bias": ("adds a bias", lambda m, t, p: additive(causal(t), -torch.inf) - (torch.arange(t) % 3)),
    "weakly hidden": ("adds a bias", lambda m, t, p: additive(causal(t), -100.0)),
    "window too long to see": ("100000 tokens", lambda m, t, p: with_window(t, 99_995)),
    "fails on longer rows": (
        "cannot be evaluated",
        lambda m, t, p: causal(t) & (torch.ones(12)[p] > 0)[:, None, None, :],
    ),
}


@pytest.fixture(scope="module")
def decide_masks(capture_each) -> Callable[..., list[int | str | None]]:
    """A function of masks that gives the sliding window or reason of refusal of each."""

    def decide(
        masks: list[Mask],
        batch: int,
        *,
        dynamic: bool = True,
        dynamic_batch: bool = False,
        content: Tensor | None = None,
    ) -> list[int | str | None]:
        """``content``: of the integer input ``[B, T]``; positions by default."""
        stored, windows = Stored(), []

        def attend(q: Tensor, positions: Tensor, mask: Mask) -> Tensor:
            return F.scaled_dot_product_attention(q, q, q, mask(stored, q.shape[2], positions))

        def note_window(gm: GraphModule) -> int:
            windows.extend(site.sliding_window for site in find_sites(gm))
            return 0

        q, positions = torch.randn(batch, HEADS, TOKENS, DIM), torch.arange(TOKENS).repeat(batch, 1)
        given = q, positions if content is None else content
        for x in given if dynamic_batch else ():
            torch._dynamo.mark_dynamic(x, 0)
        forms = [functools.partial(attend, mask=mask) for mask in masks]
        refusals = capture_each(forms, given, [find_attention_pass, note_window], dynamic=dynamic)
        of_sites = iter(windows)
        return [next(of_sites) if refusal is None else str(refusal) for refusal in refusals]

    return decide


MASKS: dict[str, tuple[int | str | None, Mask]] = {
    **{f"causal, {name}": (None, mask) for name, mask in CAUSAL.items()},
    **{f"window of {name}": made for name, made in BANDED.items()},
    **REFUSED,
}
"""What becomes of a mask: None where it is causal, the sliding window that is measured, or the reason of refusal."""


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.exhaustive), 2], ids=["B1", "B2"])
def decided(request: pytest.FixtureRequest, decide_masks) -> dict[str, int | str | None]:
    """What became of each mask of the table."""
    return dict(zip(MASKS, decide_masks([mask for _, mask in MASKS.values()], request.param), strict=True))


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_is_proved_causal_or_banded_or_refused(name, decided):
    expected, found = MASKS[name][0], decided[name]
    assert expected in found if isinstance(expected, str) else found == expected


def test_every_row_of_a_batch_of_any_size_counts(decide_masks):
    def second_row_sees_all(m: Stored, t: int, p: Tensor) -> Tensor:
        return causal(t) | (torch.arange(p.shape[0]) == 1)[:, None, None, None]

    masks = [CAUSAL["compared positions"], BANDED["on positions"][1], second_row_sees_all]
    proved, window, reason = decide_masks(masks, 2, dynamic_batch=True)
    assert (proved, window) == (None, 6)
    assert "not causal" in str(reason)


CONTENT: dict[str, Mask] = {
    "order of types": lambda m, t, ids: (ids[:, :, None] >= ids[:, None, :])[:, None],
    "group of ones": lambda m, t, ids: (causal(t) | ((ids == 1)[:, :, None] & (ids == 1)[:, None, :]))[:, None],
}


@pytest.mark.parametrize("dynamic", [True, False])
def test_a_mask_that_depends_on_what_is_no_row_of_positions_is_refused(dynamic, decide_masks):
    types = torch.tensor([[0, 0, 1, 1, 1, 1, 0, 2, 2, 2, 2]])
    reasons = decide_masks([*CONTENT.values()], 1, dynamic=dynamic, content=types)
    assert all("no row of positions" in str(reason) for reason in reasons)


def test_positions_after_left_padding_are_positions(decide_masks):
    padded = torch.stack([torch.arange(TOKENS), (torch.arange(TOKENS) - 4).clamp(min=0)])
    assert decide_masks([CAUSAL["compared positions"]], 2, content=padded) == [None]


def test_writes_between_two_calls_are_seen(capture):
    def attend(q: Tensor) -> Tensor:
        mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
        first = F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
        mask.logical_and_(torch.ones_like(mask).triu(-3))
        return first + F.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    gm, _ = capture(attend, [torch.randn(1, HEADS, TOKENS, DIM)], [find_attention_pass], execute=False)
    assert [site.sliding_window for site in find_sites(gm)] == [None, 4]


def test_a_mask_made_from_an_input_is_refused_with_module_path_and_node(decoder, capture_each, inputs):
    def attend(m, q, k, v, p) -> Tensor:
        mask = m.given if m.given.shape[2] == m.given.shape[3] else causal(q.shape[2]) & (m.given > 0)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    def masked(ids: Tensor, positions: Tensor, *masks: Tensor, which: int) -> Tensor:
        model.layers[0].given = masks[which]
        return model(ids, positions)

    model = decoder(attend, layers=1)
    padding = torch.ones(2, 1, 1, TOKENS)
    given = torch.ones(2, 1, TOKENS, TOKENS, dtype=torch.bool).tril(), padding.bool(), padding
    forms = [functools.partial(masked, which=which) for which in range(3)]
    found = capture_each(forms, (*inputs(), *given), [find_attention_pass])
    reasons = ("whose content is unknown", "no row of positions", "no row of positions")
    for refusal, reason in zip(found, reasons, strict=True):
        assert reason in str(refusal) and refusal.module_path.endswith("layers.0") and refusal.node
