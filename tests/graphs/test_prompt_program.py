"""The program of a prompt: its nodes, its operators, passes over it."""

import pytest
import torch

import kvpass.ops.prompt_operators  # noqa: F401 (registers the operators)
from compiled_models import compiled_anew
from kvpass import POLICIES
from kvpass.graphs import passes
from kvpass.policies import resolve
from kvpass.policies.layer_splits import EntropyLayers, UniformLayers
from numeric_checks import prefill_buffers
from tiny_models import POLICY_OPTIONS, random_ids

OPS = torch.ops.kvpass
B, K, N, D, LAYERS, WINDOW = 2, 2, 30, 8, 3, 4


def operands(policy):
    """Attention, first columns and cache of a prompt, whose second row has three columns of padding."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, heads, n, D, generator=g) for heads, n in ((2 * K, WINDOW), (K, N), (K, N)))
    buffers = prefill_buffers(policy, 6, LAYERS, B, K, (D, D), WINDOW + 2)
    cache = [x.nan_to_num() if x.is_floating_point() else x for x in buffers if x is not None]
    return [q, k, v, None, None], torch.tensor([0, 3]), cache


def test_operators_are_what_their_schemas_and_fakes_say():
    """Shares of layers also of a policy without a cascade, scores also of one that reads a replay."""
    policy = resolve("lava", window=WINDOW)
    attention, first, cache = operands(policy)
    place, check = (0, policy.text), torch.library.opcheck
    check(OPS.score_layer.default, (attention, first, first, cache, *place), {"scale": 0.3})
    scored = OPS.score_layer(attention, first, first, cache, *place, scale=0.3)
    check(OPS.cascade_step.default, (cache, scored, first, *place))
    check(OPS.rank_heads.default, (cache, scored, policy.text))
    shares, ranking = OPS.cascade_step(cache, scored, first, *place), OPS.rank_heads(cache, scored, policy.text)
    given = {"shares": shares, "ranking": ranking}
    check(OPS.gather_layer.default, (cache, attention, scored, first, *place), given)
    check(OPS.pack.default, (cache,))
    check(OPS.keep_newest.default, ([torch.zeros(LAYERS, B, K, 7, D) for _ in range(2)], attention, 1))
    fixed, replaying = resolve("pyramidkv", window=WINDOW), resolve("kvzip", window=WINDOW)
    check(OPS.fixed_shares.default, (operands(fixed)[2], scored, first, 0, fixed.text))
    replayed = {"scale": 0.3, "replayed": torch.rand(B, K, N)}
    check(OPS.score_layer.default, (attention, first, first, operands(replaying)[2], 0, replaying.text), replayed)


def test_a_policy_without_a_cascade_gives_no_layer_less_when_more_are_known():
    for name in POLICIES:
        policy = resolve(name, **POLICY_OPTIONS.get(name, {}))
        entries, available = torch.tensor([10, 40]), torch.tensor([25, 60])
        weights = torch.zeros(2, LAYERS, dtype=torch.float64)
        stages = [policy.layer_budgets(weights, entries, available, 2, seen) for seen in range(1, LAYERS + 1)]
        kept = all(torch.equal(stage[:, :seen], stages[-1][:, :seen]) for seen, stage in enumerate(stages, 1))
        assert kept or policy.cascades, name


def test_a_split_derived_from_one_without_a_cascade_has_one_unless_it_says_otherwise():
    class ByEntropy(UniformLayers):
        weight, budgets = EntropyLayers.weight, EntropyLayers.budgets

    class Renamed(UniformLayers):
        pass

    assert ByEntropy().cascades and not Renamed().cascades and not UniformLayers().cascades


def test_a_node_of_ones_own_behind_the_scores_decides_what_is_kept_and_is_dumped(monkeypatch, tmp_path):
    def first_tokens_best(scored):
        scores, *rest = scored
        best = torch.arange(scores.shape[2]) < 4
        return scores.masked_fill(best & (scores > float("-inf")), torch.finfo(torch.float32).max), *rest

    def keep_first_tokens_pass(gm):
        nodes = gm.graph.find_nodes(op="call_function", target=OPS.score_layer.default)
        for node in nodes:
            with gm.graph.inserting_after(node):
                changed = gm.graph.call_function(first_tokens_best, (node,))
            node.replace_all_uses_with(changed, delete_user_cb=lambda user, changed=changed: user is not changed)
        return len(nodes)

    ids = random_ids(1, 80)
    monkeypatch.setattr(passes, "PROGRAM_PASSES", [keep_first_tokens_pass])
    monkeypatch.setenv("KVPASS_DUMP", str(tmp_path))
    fast = compiled_anew(policy="keydiff")
    with pytest.raises(RuntimeError, match="no prompt has been compiled yet"):
        fast.program()
    positions = fast.compress(ids).positions
    assert (positions[..., :4] == torch.arange(4)).all() and "first_tokens_best" in str(fast.program())
    (dumped,) = tmp_path.glob("prefill.*.program_0.txt")
    operators = ("run_layer", "score_layer", "gather_layer", "pack")
    assert all(name in dumped.read_text() for name in operators)
    monkeypatch.setenv("KVPASS_DISABLE_PASSES", "keep_first_tokens")
    other = compiled_anew(policy="keydiff")
    with pytest.warns(UserWarning, match="keep_first_tokens"):
        assert not (other.compress(ids).positions[..., :4] == torch.arange(4)).all()
    assert "first_tokens_best" not in str(other.program())
