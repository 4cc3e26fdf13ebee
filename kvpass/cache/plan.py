"""Decision without a model: which entries a policy keeps for given queries, keys and values.

The eager operators fill the layers of a cache, as those of a compiled model do on a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvpass.cache.layers import FullAttentionLayers
from kvpass.cache.prefill import PrefillLayers
from kvpass.cache.state import KVState
from kvpass.config import Budget, BudgetLike, Geometry, LayerGroup, PoolFacts
from kvpass.operands import Attention, EvictBuffers, PolicyInputs, from_names
from kvpass.ops import reference
from kvpass.ops.compress import compress_layer
from kvpass.ops.evict import attend_evict
from kvpass.policies import parse_budget, resolve
from kvpass.policies.base import Input, Policy
from kvpass.policies.observation import projected_norms
from kvpass.policies.options import check_float
from kvpass.policies.replay import Replayed, most_attended
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


@torch.no_grad()
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
    """Return what a policy keeps of a prompt and while decoding.

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
    k = _checked("keys", keys, L=None, B=None, K=None, N=None, D=None)
    layers, batch, kv_heads, n, dim = k.shape
    v = _checked("values", values, L=layers, B=batch, K=kv_heads, N=n, Dv=None)
    q = _checked("queries", queries, L=layers, B=batch, H=None, R=None, D=dim)
    heads, rows, least = q.shape[2], q.shape[3], max(min(chosen.window, n), 1)
    if heads % kv_heads:
        raise ValueError(f"queries.shape={tuple(q.shape)}: H={heads} must be a positive multiple of K={kv_heads}")
    if not least <= rows <= n:
        raise ValueError(f"queries.shape={tuple(q.shape)}: R={rows} must be in [{least}, {n}] (window, prompt)")
    if decode is not None:
        if len(decode) != 3:
            raise ValueError(f"decode has {len(decode)} tensors: must be queries, keys and values")
        for name, tensor, like in zip(("queries", "keys", "values"), decode, (q, k, v), strict=True):
            sizes = {"S": len(decode[0]), "L": layers, "B": batch, "heads": like.shape[2], "D": like.shape[4]}
            _checked(f"decode {name}", tensor, **sizes)
    scale = dim**-0.5 if scale is None else scale
    check_float("scale", scale, 0.0, open_low=True)

    def read(
        name: str, as_input: Input, tensors: Layers | None, sizes: Mapping[str, int | None]
    ) -> Sequence[Tensor | None]:
        """Return a tensor of each layer, or None of each where the policy has not this input."""
        if as_input not in chosen.inputs:
            return [None] * layers
        if tensors is None:
            raise ValueError(f"policy {chosen.name!r} reads {as_input}: pass {name}= a tensor for each layer")
        return list(_checked(name, tensors, L=layers, **sizes))

    rule = chosen.decode_rule()
    decoded = 0 if decode is None or rule is None or not rule.reads_tokens else len(decode[0])
    projections = read("output_weights", "projection", output_weights, {"hidden": None, "H * Dv": heads * v.shape[4]})
    frequencies = read("rope_frequencies", "rotation", rope_frequencies, {"D / 2": dim // 2})
    hidden = read("entering", "token_scores", entering, {"B": batch, "N": n + decoded, "hidden": None})
    if "replays" in chosen.inputs:
        _check_replays(chosen, replays, k, heads)

    parsed = parse_budget(chosen, budget)
    geometry = Geometry(layers=layers, kv_heads=kv_heads, key_dim=dim, value_dim=v.shape[4], itemsize=k.element_size())
    limit = n if parsed is None else parsed.check(n, chosen.window, geometry.token_bytes())
    first = torch.zeros(batch, dtype=torch.int64, device=k.device)
    start = first.cpu()
    group, facts = LayerGroup(geometry=geometry, layers=tuple(range(layers))), PoolFacts(heads // kv_heads, plain=True)
    state = KVState(policy=chosen, budget=parsed, start=start, columns=n, budgets=[limit] * batch)
    prefill, found = PrefillLayers(group, facts, state, k.dtype, k.device), []
    buffers = prefill.buffers
    for i, x in enumerate(hidden):
        call = Attention(q[i], k[i], v[i], scale)
        inputs = PolicyInputs(
            projections[i],
            frequencies[i],
            replayed=_most_attended(chosen, replays, call, i, projections[i]) if "replays" in chosen.inputs else None,
            entered=None if x is None else chosen.token_scores(x[:, :n], i, layers, kv_heads, ONE_PROCESS),
        )
        found.append(compress_layer(reference, call, None, start, first, i, chosen, buffers, ONE_PROCESS, inputs))
    reference.pack(buffers)
    entries = buffers.entries
    (cache, record), scores = prefill.finish(), torch.stack(found)

    keep = _kept(cache, n, n)
    available = torch.full_like(entries, n - min(chosen.window, n))
    budgets = chosen.layer_budgets(record.weights, entries, available, kv_heads, layers)
    return Plan(
        policy=chosen,
        budget=parsed,
        keep=keep,
        lengths=keep.sum(-1),
        layer_budgets=budgets.T.double() / kv_heads,
        scores=scores.masked_fill(scores == float("-inf"), float("nan")),
        decode_keep=None if decode is None else _decoded(cache, keep, decode, scale, hidden),
    )


def _decoded(
    cache: FullAttentionLayers, keep: Tensor, decode: Sequence[Tensor], scale: float, hidden: Sequence[Tensor | None]
) -> Tensor:
    """Return the entries after each of S decoded tokens, bool ``[S, L, B, K, N + S]``."""
    n, steps, rule = keep.shape[3], len(decode[0]), cache.policy.decode_rule()
    if rule is None:
        return torch.stack([pad(pad(keep, (0, i + 1), value=True), (0, steps - i - 1)) for i in range(steps)])
    masks = []
    for column, tensors in enumerate(zip(*decode, strict=True), n):
        cache.ensure_room(1)
        buffers = from_names(EvictBuffers, cache.cached_state)
        for layer, x in enumerate(hidden):
            q, k, v = (tensor[layer][:, :, None] for tensor in tensors)
            new = x[:, column, None] if x is not None and rule.reads_tokens else None
            attend_evict(Attention(q, k, v, scale), buffers, layer, cache.policy, entering=new)
        cache.advance(1)
        masks.append(_kept(cache, column + 1, n + steps))
    return torch.stack(masks)


def _kept(cache: FullAttentionLayers, seen: int, columns: int) -> Tensor:
    """Return which tokens have an entry, bool ``[L, B, K, columns]``, when so many were seen."""
    positions = cache.positions(torch.full((cache.rows,), seen, device=cache.buffers.offsets.device))
    mask = torch.zeros(*positions.shape[:3], columns + 1, dtype=torch.bool, device=positions.device)
    return mask.scatter(3, torch.where(positions < 0, columns, positions), True)[..., :columns].transpose(0, 1)


def _check_replays(policy: Policy, replays: Sequence[Replayed], k: Tensor, heads: int) -> None:
    layers, batch, kv_heads, n, dim = k.shape
    if not replays:
        raise ValueError(f"policy {policy.name!r} reads what tokens behind the prompt attend to: pass replays=[...]")
    for at, (first, last, sinks, queries, keys, norms) in enumerate(replays):
        if not 0 <= sinks <= first < last <= n:
            raise ValueError(
                f"replays[{at}]: sinks={sinks}, first={first}, last={last} must ascend, up to the prompt's {n}"
            )
        tokens = _checked(f"replays[{at}].keys", keys, L=layers, B=batch, K=kv_heads, T=None, D=dim).shape[3]
        _checked(f"replays[{at}].queries", queries, L=layers, B=batch, H=heads, T=tokens, D=dim)
        if "norms" in policy.inputs:
            _checked(f"replays[{at}].norms", norms, L=layers, B=batch, T=tokens)


def _most_attended(
    policy: Policy, replays: Sequence[Replayed], call: Attention, layer: int, weight: Tensor | None
) -> Tensor:
    """Return :func:`most_attended` of a layer; by norms, ``weight`` is that of the output projection."""
    of_layer = [
        replay._replace(
            queries=replay.queries[layer],
            keys=replay.keys[layer],
            norms=None if replay.norms is None else replay.norms[layer],
        )
        for replay in replays
    ]
    norms = projected_norms(call.v, weight, 2) if weight is not None and "norms" in policy.inputs else None
    return most_attended(call.k, of_layer, call.scale, value_norms=norms)


def _checked(name: str, tensors: Layers | None, **sizes: int | None) -> Tensor:
    """Return one tensor, or those of each layer as one: floating, finite, of these sizes; None: any from 1 on."""
    if not isinstance(tensors, Tensor | None):
        shapes = {tuple(x.shape) for x in tensors}
        if len(shapes) != 1:
            raise ValueError(f"{name}: must be a tensor, or tensors of one shape, one for each layer: {sorted(shapes)}")
        tensors = torch.stack(tuple(tensors))
    shape = None if tensors is None else tuple(tensors.shape)
    pairs = zip(shape or (), sizes.values(), strict=False)
    if tensors is None or tensors.ndim != len(sizes) or any(n == 0 or n != (size or n) for n, size in pairs):
        wanted = ", ".join(axis if size is None else str(size) for axis, size in sizes.items())
        raise ValueError(f"{name}.shape={shape}: must be [{wanted}], no axis of 0")
    if not tensors.is_floating_point():
        raise ValueError(f"{name}.dtype={tensors.dtype}: must be a floating dtype")
    bad = (~tensors.isfinite()).nonzero().tolist()
    if bad:
        raise ValueError(f"{name}{bad[0]}={tensors[tuple(bad[0])].item()}: all values must be finite")
    return tensors
