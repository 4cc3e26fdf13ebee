"""Decision without a model: which entries a policy keeps for given queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvpass.config import Budget, BudgetLike, Geometry
from kvpass.operands import PolicyInputs
from kvpass.policies import parse_budget, resolve
from kvpass.policies.base import Policy
from kvpass.policies.decode_rules import DecodeRule, Slots, keep_mask
from kvpass.policies.observation import Observation, projected_norms
from kvpass.policies.options import check_float
from kvpass.policies.replay import Replayed, most_attended
from kvpass.policies.scheduler import best_over_layers
from kvpass.ranks import ONE_PROCESS

Layers = Tensor | Sequence[Tensor]


@dataclass(frozen=True, eq=False)
class Plan:
    """Result of :func:`plan`: the entries that a policy keeps.

    Attributes:
        policy: with all its options. budget: as given; None if the policy has none.
        keep: after prefill, bool ``[L, B, K, N]``; the window included.
        lengths: entries kept, int64 ``[L, B, K]``.
        layer_budgets: evictable entries a layer may hold per KV head, mean over heads, fp64 ``[L, B]``.
        scores: fp32 ``[L, B, K, N]``, NaN where not scored (the window).
        decode_keep: after each decoded token, bool ``[S, L, B, K, N + S]``; None without decode tensors. A policy
            without a decode rule only appends.
    """

    policy: Policy
    budget: Budget | None
    keep: Tensor
    lengths: Tensor
    layer_budgets: Tensor
    scores: Tensor
    decode_keep: Tensor | None = None

    def to_dict(self) -> dict[str, object]:
        """Return all but scores in plain JSON types; ``kept`` lists positions as ``[L][B][K]``."""
        layers, batch, kv_heads, length = self.keep.shape
        return {
            "policy": self.policy.spec,
            "budget": None if self.budget is None else str(self.budget),
            "layers": layers,
            "batch": batch,
            "kv_heads": kv_heads,
            "length": length,
            "lengths": self.lengths.tolist(),
            "layer_budgets": self.layer_budgets.tolist(),
            "kept": _positions(self.keep),
            "decode_kept": None if self.decode_keep is None else [_positions(step) for step in self.decode_keep],
        }


def plan(
    policy: str | Policy,
    queries: Layers,
    keys: Layers,
    values: Layers,
    *,
    budget: BudgetLike,
    decode: tuple[Tensor, Tensor, Tensor] | None = None,
    scale: float | None = None,
    output_weights: Layers | None = None,
    rope_frequencies: Layers | None = None,
    replays: Sequence[Replayed] = (),
    entering: Layers | None = None,
    **options: object,
) -> Plan:
    """Return what a policy keeps of a prompt and while decoding, by the same policy, in a loop of its own.

    Every row of the batch is decided on its own and gets the same result as alone.

    Args:
        policy: a name or a policy. options: the policy's own.
        queries: the last R prompt queries, RoPE applied, ``[L, B, H, R, D]`` or one tensor per layer; R must cover the
            window, or the whole prompt for policies that sum over all rows.
        keys: ``[L, B, K, N, D]``, RoPE applied. values: ``[L, B, K, N, Dv]``. H is a multiple of K.
        budget: as in :func:`kvpass.compile`; None only for policies without one.
        decode: queries, keys and values of S further tokens, ``[S, L, B, heads, D]``.
        scale: factor of the attention logits; ``D ** -0.5`` by default.
        output_weights: for policies that read it, the output projection of each layer, ``[L, hidden, H * Dv]``
            (``[out, in]`` as in ``torch.nn.Linear``).
        rope_frequencies: for policies that read them, the inverse frequencies of the rotary embedding of each layer,
            ``[L, D / 2]``; channels j and ``j + D / 2`` of queries and keys turn together.
        replays: for policies that read them, queries ``[L, B, H, T, D]`` and keys ``[L, B, K, T, D]`` of what runs
            behind the prompt; for those that weigh them also norms ``[L, B, T]``.
        entering: for policies that score tokens by it, what enters the attention layers, ``[L, B, N, hidden]``; of
            ``N + S`` tokens where the decode rule reads it.
    Raises:
        ValueError: unknown policy or option, option or budget out of range, shapes that do not fit together, a value
            that is not finite, ``R < window``, ``N = 0``, no ``output_weights``, ``rope_frequencies``, ``replays`` or
            ``entering`` where the policy reads them.
    """
    chosen = resolve(policy, **options)
    k = _checked("keys", _stack("keys", keys), L=None, B=None, K=None, N=None, D=None)
    layers, batch, kv_heads, length, dim = k.shape
    v = _checked("values", _stack("values", values), L=layers, B=batch, K=kv_heads, N=length, Dv=None)
    q = _checked("queries", _stack("queries", queries), L=layers, B=batch, H=None, R=None, D=dim)
    heads, rows_given, least = q.shape[2], q.shape[3], max(min(chosen.window, length), 1)
    if heads % kv_heads:
        raise ValueError(f"queries.shape={tuple(q.shape)}: H={heads} must be a positive multiple of K={kv_heads}")
    if not least <= rows_given <= length:
        raise ValueError(
            f"queries.shape={tuple(q.shape)}: R={rows_given} must be in [{least}, {length}] (window, prompt)"
        )
    if decode is not None:
        if len(decode) != 3:
            raise ValueError(f"decode has {len(decode)} tensors: must be queries, keys and values")
        count = None
        for name, tensor, like in zip(("queries", "keys", "values"), decode, (q, k, v), strict=True):
            sizes = {"L": layers, "B": batch, "heads": like.shape[2], "D": like.shape[4]}
            count = len(_checked(f"decode {name}", tensor, S=count, **sizes))
    projections = _of_layers(
        chosen, layers, "output_weights", {"hidden": None, "H * Dv": heads * v.shape[4]}, output_weights
    )
    frequencies = _of_layers(chosen, layers, "rope_frequencies", {"D / 2": dim // 2}, rope_frequencies)
    rule = chosen.decode_rule()
    more = 0 if decode is None or rule is None or not rule.reads_tokens else len(decode[0])
    hidden = _of_layers(chosen, layers, "entering", {"B": batch, "N": length + more, "hidden": None}, entering)
    factor = dim**-0.5 if scale is None else scale
    check_float("scale", factor, 0.0, open_low=True)
    attended = _attended(chosen, replays, q, k, v, projections, factor)
    parsed, entries, available = _entries(chosen, budget, k, v)
    every = [
        None if x is None else chosen.token_scores(x, layer, layers, kv_heads, ONE_PROCESS)
        for layer, x in enumerate(hidden)
    ]
    entered = [None if found is None else found[..., :length] for found in every]
    new_scores = [torch.stack([x[..., length:] for x in every if x is not None]).movedim(3, 0)] if more else []
    given = [
        PolicyInputs(weight, turns, entries, replayed=most, entered=found)
        for weight, turns, most, found in zip(projections, frequencies, attended, entered, strict=True)
    ]

    window = min(chosen.window, length)
    sites = [
        Observation(queries, keys, values, factor, window, i, layers, asked=asked)
        for i, (queries, keys, values, asked) in enumerate(zip(q, k, v, given, strict=True))
    ]
    scores, weights, limits = _judged(chosen, sites, entries, available)
    scored = scores > float("-inf")
    ranks = torch.stack([chosen.rank(layer, entries) for layer in scores])
    keep = ~scored | (ranks < limits.T[:, :, None, None])
    steps = None
    if decode is not None:
        quota = chosen.decode_quota((keep & scored).sum(3), entries, available)
        states = [None if rule is None else rule.start(obs, found) for obs, found in zip(sites, scores, strict=True)]
        per_layer = [
            decode_layer(rule, obs, keep[i], states[i], quota[i], *(x[:, i] for x in (*decode, *new_scores)))
            for i, obs in enumerate(sites)
        ]
        steps = torch.stack(per_layer, 1)
    return Plan(
        policy=chosen,
        budget=parsed,
        keep=keep,
        lengths=keep.sum(-1),
        layer_budgets=chosen.recorded_budgets(weights, entries, available, kv_heads).T.double() / kv_heads,
        scores=scores.masked_fill(~scored, float("nan")),
        decode_keep=steps,
    )


def _judged(
    policy: Policy, sites: Sequence[Observation], entries: Tensor, available: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return scores fp32 ``[L, B, K, N]``, ``-inf`` in the window, layer weights and what each layer may hold.

    The last two are fp64 and int64 ``[B, L]``; a layer holds no more than at any stage of the cascade.
    """
    batch, kv_heads, length, _ = sites[0].keys.shape
    layers, device = len(sites), entries.device
    scores = torch.full((layers, batch, kv_heads, length), float("-inf"), device=device)
    weights = torch.zeros(batch, layers, dtype=torch.float64, device=device)
    limits = torch.full((batch, layers), torch.iinfo(torch.int64).max, device=device)
    for i, obs in enumerate(sites):
        scores[i, :, :, : obs.evictable] = found = policy.checked_score(obs)
        weight = policy.checked_weight(obs, found)
        if weight is not None:
            weights[:, i] = weight
        if policy.compares_layers:
            held = scores[: i + 1].transpose(0, 1).flatten(1)
            of_layer = torch.arange(i + 1, device=device).repeat_interleave(kv_heads * length).expand(held.shape)
            weights = best_over_layers(held, of_layer, entries * (layers * kv_heads), layers, policy.least_score)
        stage = policy.layer_budgets(weights, entries, available, kv_heads, i + 1)
        limits[:, : i + 1] = torch.minimum(limits, stage)[:, : i + 1]
    return scores, weights, limits


def decode_layer(
    rule: DecodeRule | None,
    obs: Observation,
    keep: Tensor,
    decode_state: Tensor | None,
    quota: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    token_scores: Tensor | None = None,
) -> Tensor:
    """Entries of one layer after each of S decoded tokens, bool ``[S, B, K, N + S]``; slots are positions.

    Args:
        rule: None: tokens are only appended.
        keep: prompt entries that prefill kept, bool ``[B, K, N]``. decode_state: as ``rule.start`` gives it.
        quota: entries a head may hold besides the newest ``rule.window``, int64 ``[B, K]``.
        queries, keys, values: of the new tokens, ``[S, B, heads, D]``.
        token_scores: of these, for rules that read them, fp32 ``[S, B, K]``.
    """
    steps, length = queries.shape[0], obs.length
    live = pad(keep, (0, steps))
    every = torch.arange(live.shape[2], device=live.device).expand(live.shape)
    if rule is None or decode_state is None:
        return torch.stack([live | ((every >= length) & (every <= length + s)) for s in range(steps)])
    k = torch.cat([obs.keys.float(), keys.float().permute(1, 2, 0, 3)], 2)
    rows = rule.first_rows(obs) if rule.rows_per_head else None
    decode_state = pad(decode_state, (0, steps))
    masks = []
    for s in range(steps):
        live = live | (every == length + s)
        q = queries[s].float().unflatten(1, (obs.kv_heads, obs.group))
        logits = torch.einsum("bkgd,bknd->bkgn", q, k) * obs.scale
        attention = logits.masked_fill(~live[:, :, None], float("-inf")).softmax(-1).flatten(1, 2)
        position = torch.where(live, every, -1)
        due = rule.due(position, quota)
        if rows is not None:
            rows = rule.next_rows(rows, q, position.amax((1, 2)))
        slots = Slots(
            position,
            torch.where(live, decode_state, 0.0),
            quota,
            values[s],
            due=due,
            keys=k,
            token_scores=None if token_scores is None else token_scores[s],
            rows=rows,
            scale=obs.scale,
            softcap=obs.softcap,
        )
        worth, decode_state = rule.observe(attention, slots)
        live = keep_mask(worth, position, rule.quota_now(quota, due, worth, position), rule.window)
        masks.append(live)
    return torch.stack(masks)


def _positions(keep: Tensor) -> list[list[list[list[int]]]]:
    return [[[head.nonzero().flatten().tolist() for head in row] for row in layer] for layer in keep]


def _entries(policy: Policy, budget: BudgetLike, k: Tensor, v: Tensor) -> tuple[Budget | None, Tensor, Tensor]:
    """Return the parsed budget, its evictable entries per KV head and layer, and those there are, int64 ``[B]``."""
    layers, batch, kv_heads, length, dim = k.shape
    available = torch.full((batch,), length - min(policy.window, length), device=k.device)
    parsed = parse_budget(policy, budget)
    if parsed is None:
        return None, available, available
    geometry = Geometry(layers=layers, kv_heads=kv_heads, key_dim=dim, value_dim=v.shape[-1], itemsize=k.element_size())
    entries = parsed.check(length, policy.window, geometry.token_bytes())
    return parsed, torch.full_like(available, max(entries - policy.window, 0)), available


_READ_BY = {
    "output_weights": ("reads_projection", "output projection"),
    "rope_frequencies": ("reads_rotation", "rotary embedding"),
    "entering": ("scores_tokens", "input"),
}
"""Arguments of :func:`plan` with a tensor for each layer: what policies say that read it, and what it is."""


def _of_layers(
    policy: Policy, layers: int, name: str, sizes: Mapping[str, int | None], given: Layers | None
) -> Sequence[Tensor | None]:
    """Return a tensor of each layer, of these sizes, that the policy reads; None for each if it does not."""
    says, what = _READ_BY[name]
    if not getattr(policy, says):
        return [None] * layers
    if given is None or len(given) != layers:
        count = "none" if given is None else len(given)
        each = f"[{layers}, {_shown(sizes)}]"
        raise ValueError(f"policy {policy.name!r} reads the {what} of each layer: pass {name}={each}; {count} given")
    return [_checked(f"{name}[{layer}]", tensor, **sizes) for layer, tensor in enumerate(given)]


def _attended(
    policy: Policy,
    replays: Sequence[Replayed],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    projections: Sequence[Tensor | None],
    scale: float,
) -> Sequence[Tensor | None]:
    """Return :func:`most_attended` of each layer, None for each if the policy does not read it."""
    layers, batch, kv_heads, length, dim = k.shape
    if not policy.reads_replays:
        return [None] * layers
    if not replays:
        raise ValueError(f"policy {policy.name!r} reads what tokens behind the prompt attend to: pass replays=[...]")
    for at, (first, last, sinks, queries, keys, norms) in enumerate(replays):
        if not 0 <= sinks <= first < last <= length:
            raise ValueError(
                f"replays[{at}]: sinks={sinks}, first={first}, last={last} must ascend, up to the prompt's {length}"
            )
        tokens = _checked(f"replays[{at}].keys", keys, L=layers, B=batch, K=kv_heads, T=None, D=dim).shape[3]
        _checked(f"replays[{at}].queries", queries, L=layers, B=batch, H=q.shape[2], T=tokens, D=dim)
        if policy.weighs_replays:
            _checked(f"replays[{at}].norms", norms, L=layers, B=batch, T=tokens)

    found = []
    for layer, weight in enumerate(projections):
        norms_of = [None if part.norms is None else part.norms[layer] for part in replays]
        parts = [
            part._replace(queries=part.queries[layer], keys=part.keys[layer], norms=own)
            for part, own in zip(replays, norms_of, strict=True)
        ]
        norms = projected_norms(v[layer], weight, 2) if policy.weighs_replays and weight is not None else None
        found.append(most_attended(k[layer], parts, scale, value_norms=norms))
    return found


def _stack(name: str, tensors: Layers) -> Tensor:
    """Return ``[L, ...]`` from a tensor or one tensor per layer."""
    if isinstance(tensors, Tensor):
        return tensors
    if len(tensors) == 0 or any(not isinstance(t, Tensor) for t in tensors):
        raise ValueError(f"{name}: expected a tensor or a non-empty sequence of tensors, one per layer")
    shapes = {tuple(t.shape) for t in tensors}
    if len(shapes) > 1:
        raise ValueError(f"{name}: layers differ in shape: {sorted(shapes)}")
    return torch.stack(list(tensors))


def _checked(name: str, tensor: Tensor | None, **sizes: int | None) -> Tensor:
    """Return a tensor of floating numbers, all finite, with these sizes of its axes; None: any from 1 on."""
    shape = () if tensor is None else tuple(tensor.shape)
    wrong = [n for n, size in zip(shape, sizes.values(), strict=False) if n == 0 or n != (size or n)]
    if tensor is None or wrong or len(shape) != len(sizes):
        raise ValueError(f"{name}.shape={None if tensor is None else shape}: must be [{_shown(sizes)}], no axis of 0")
    if not tensor.is_floating_point():
        raise ValueError(f"{name}.dtype={tensor.dtype}: must be a floating dtype")
    bad = ~torch.isfinite(tensor)
    if bool(bad.any()):
        index = bad.nonzero()[0].tolist()
        raise ValueError(f"{name}{index}={tensor[tuple(index)].item()}: all values must be finite")
    return tensor


def _shown(sizes: Mapping[str, int | None]) -> str:
    return ", ".join(axis if size is None else str(size) for axis, size in sizes.items())
