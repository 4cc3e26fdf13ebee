"""Policies: names, options and their ranges, specs that can be read back, policies of one's own."""

import dataclasses
import math
import re
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import pytest
import torch

import kvpass
from kvpass.config import Budget
from kvpass.policies import POLICIES, Policy, from_spec, register_policy, resolve
from kvpass.policies.cake import TEMPERATURES, temperatures
from kvpass.policies.layer_splits import EntropyLayers
from kvpass.policies.observation import Observation
from kvpass.policies.snapkv import SnapKV
from kvpass.policies.tova import Tova
from tiny_models import compiled_once, random_ids, tiny_model

TAUS = {"tau1": 1.0, "tau2": 1.0}


def needed(name: str) -> dict[str, object]:
    head_map = [[0.5, 1.0], [0.2, 0.0]]
    return {"cake": dict(TAUS), "duo_attention": {"head_map": head_map}, "kvzap": {"weights": "FILE"}}.get(name, {})


@pytest.mark.parametrize("name", [*POLICIES])
@pytest.mark.parametrize("parity", ["paper", "code"])
def test_spec_can_be_read_back_and_a_policy_is_a_value(name, parity):
    policy = resolve(name, parity=parity, **needed(name))
    assert from_spec(policy.spec) == policy and hash(from_spec(policy.spec)) == hash(policy)
    assert resolve(policy, window=7).window == 7 and resolve(policy) == policy
    assert from_spec(policy.spec) is from_spec(policy.spec) and from_spec(policy.text) == policy
    assert from_spec(resolve(policy, window=7).text) == resolve(policy, window=7)
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.window = 3


def test_numbers_of_numpy_are_those_of_python():
    given = resolve("ada_snapkv", window=np.int64(8), kernel_size=np.int32(5), alpha=np.float32(0.29))
    assert given == resolve("ada_snapkv", window=8, kernel_size=5, alpha=0.29) and from_spec(given.spec) == given
    with pytest.raises(ValueError, match="window=-1: must be an int >= 0"):
        resolve("lava", window=np.int64(-1))


def test_contract_10_an_unknown_name_is_answered_with_the_nearest():
    for given, near in (("lva", "lava"), ("Ada-SnapKV", "ada_snapkv"), ("streaming", "streaming_llm")):
        with pytest.raises(ValueError, match=f"policy='{given}'.*'{near}'"):
            resolve(given)


REPLAYING = ["kvzip", "kvzip_plus"]
POOLING = "lava snapkv ada_pyramidkv cake chunkkv criticalkv dropkv h2o vatp r_kv defensivekv layer_defensivekv".split()
SHARING = "lava lava_uniform ada_snapkv ada_pyramidkv compactor criticalkv dropkv expected_attention".split()
FIRST = "streaming_llm vatp compactor duo_attention expected_attention lagkv kvzap kvzip kvzip_plus".split()
BAD_OPTIONS = [
    ("window", -1, [*POLICIES]),
    ("window", True, [*POLICIES]),
    ("parity", "papr", [*POLICIES]),
    *(("pool", bad, "lava snapkv pyramidkv ada_snapkv cake chunkkv criticalkv h2o vatp".split()) for bad in ("mx", 3)),
    *(("kernel_size", bad, POOLING) for bad in (0, 4, -3, 5.0, None)),
    ("group", "median", ["lava", "snapkv", "cake", "chunkkv", "criticalkv", "h2o", "triattention", "vatp"]),
    *(("alpha", bad, SHARING) for bad in (-0.1, 1.1, math.nan, "a")),
    *(("beta", bad, ["pyramidkv", "ada_pyramidkv", "lava_pyramid"]) for bad in (0, -2, 2.5)),
    *(("gamma", bad, ["cake"]) for bad in (-1, math.inf, None)),
    *((tau, bad, ["cake", "snapkv", "h2o"]) for tau in TAUS for bad in (0, -1.0, math.inf, True)),
    ("tau1", None, ["cake"]),
    ("sinks", -1, FIRST),
    ("base", "lava", ["criticalkv"]),
    *(("blend", bad, ["compactor"]) for bad in (-0.1, math.inf, "a")),
    ("form", "cake", ["dropkv"]),
    *(("first_stage", bad, ["criticalkv"]) for bad in (-0.1, 1.1, math.nan)),
    *(("epsilon", bad, ["criticalkv", "expected_attention"]) for bad in (-1, math.inf)),
    ("critical", 1, ["snapkv", "ada_snapkv", "expected_attention"]),
    ("n_future", 0, ["expected_attention"]),
    ("covariance", 1, ["expected_attention"]),
    ("value_norm", "no", ["expected_attention"]),
    ("head_split", "x", ["expected_attention"]),
    *(("lag", bad, ["lagkv"]) for bad in (1, 2.5)),
    ("cross_scoring", 1, ["lagkv"]),
    *(("chunk", bad, ["chunkkv", "compactor", *REPLAYING]) for bad in (0, 2.0)),
    *(("spikes", bad, ["chunkkv"]) for bad in (-1, None)),
    ("each_head", 1, ["chunkkv"]),
    ("overlap", -1, REPLAYING),
    ("split", "x", REPLAYING),
    *((ids, bad, REPLAYING) for ids in ("prompt_ids", "again_ids", "suffix_ids") for bad in ((-1,), 5, "a")),
    ("normalize", 1, ["ada_snapkv"]),
    ("layer_split", "pyramid", ["snapkv", "h2o"]),
    ("shape", "square", ["pyramidkv"]),
    ("short_uniform", 1, ["pyramidkv"]),
    ("indicator", "std", ["cake", "vatp"]),
    ("evict_during_decode", "no", ["cake", "h2o", "tova", "streaming_llm", "vatp", "kvzap"]),
    ("seed", -1, ["random", "snapkv"]),
    *((option, bad, ["r_kv"]) for option in ("importance", "threshold") for bad in (-0.1, 1.1, math.nan)),
    *(("buffer", bad, ["r_kv", "triattention"]) for bad in (0, 2.0, True)),
    *(("head_map", bad, ["duo_attention"]) for bad in ((), [[]], [[1.0], [1.0, 0.5]], 3, None)),
    ("of_model", 3, ["duo_attention"]),
    *(("statistics", bad, ["expected_attention", "triattention"]) for bad in (3, "")),
    *(("weights", bad, ["kvzap"]) for bad in (3, "", None)),
    *(("threshold", bad, ["kvzap"]) for bad in (math.nan, math.inf, "-5")),
    ("aggregate", "sum", ["triattention"]),
    ("longest", 0, ["triattention"]),
]


@pytest.mark.parametrize(
    ("policy", "option", "value"), [(policy, option, value) for option, value, names in BAD_OPTIONS for policy in names]
)
def test_contract_10_an_option_out_of_range_is_named_with_value_and_range(policy, option, value):
    with pytest.raises(ValueError, match=rf"{option}={re.escape(repr(value))}: .*(must be|needs) .+"):
        resolve(policy, **(needed(policy) | {option: value}))


@pytest.mark.parametrize("name", [*POLICIES])
def test_contract_10_an_unknown_option_is_answered_with_the_policys_own(name):
    own = ", ".join(field.name for field in dataclasses.fields(POLICIES[name]))
    said = f"budgets=3: not an option of policy '{name}'; did you mean 'budget'. "
    with pytest.raises(ValueError, match=said) as refused:
        resolve(name, budgets=3)
    assert str(refused.value).endswith(f"its options are {own}")


def test_an_argument_of_compile_among_options_is_not_advised_as_itself():
    with pytest.raises(ValueError, match="backend='eager': not an option of policy 'lava'; its options are window, "):
        resolve("lava", backend="eager")


def test_cake_layer_split_needs_temperatures():
    with pytest.raises(ValueError, match="tau1=None"):
        resolve("snapkv", layer_split="cake")
    with pytest.raises(ValueError, match="tau2=None"):
        resolve("cake", tau1=1.0)


def test_published_temperatures():
    assert temperatures("meta-llama/Llama-3.1-8B-Instruct", 1024) == (1.6, 0.4)
    assert temperatures("meta-llama/Meta-Llama-3.1-8B", 128) == (1.6, 0.6)
    assert temperatures("meta-llama/Llama-2-13b-chat-hf", 128) == (1.8, 2.0)
    assert temperatures("mistralai/Mistral-7B-Instruct-v0.3", 1024) == (0.8, 0.5)
    assert temperatures("Qwen/Qwen2.5-7B-Instruct", 128) == (0.4, 0.6)
    assert temperatures("Qwen/Qwen2.5-7B-Instruct", Budget.parse(128)) == (0.4, 0.6)
    assert len(TEMPERATURES) == 10
    with pytest.raises(ValueError, match="model='gpt2', budget=64"):
        temperatures("gpt2", 64)


policy_class = dataclasses.dataclass(frozen=True, kw_only=True)


def registered(kind):
    return register_policy(policy_class(kind))


@pytest.fixture
def registry():
    before = dict(POLICIES)
    yield
    POLICIES.clear()
    POLICIES.update(before)
    from_spec.cache_clear()


def test_a_spec_gives_the_policy_that_was_registered_last(registry):
    kinds = [policy_class(type("Mine", (SnapKV,), {"name": "mine"})) for _ in range(2)]
    for kind in (*kinds, kinds[0]):
        register_policy(kind)
        assert type(from_spec('{"policy": "mine"}')) is type(resolve("mine")) is kind


def test_contract_10_another_default_keeps_the_range_of_an_option():
    @policy_class
    class Wider(SnapKV):
        name: ClassVar[str] = "wider"
        kernel_size: int = 9

    assert Wider().kernel_size == 9
    with pytest.raises(ValueError, match="kernel_size=4: must be odd"):
        Wider(kernel_size=4)


def test_only_a_registered_class_can_be_compiled(registry):
    """Operators know a policy by its name and options."""

    @policy_class
    class First(SnapKV):
        def score(self, obs):
            return -torch.arange(obs.evictable).float().expand(1, obs.kv_heads, -1)

    @policy_class
    class Nameless(Policy):
        def score(self, obs):
            return torch.zeros(1, obs.kv_heads, obs.evictable)

    model = tiny_model("llama", num_hidden_layers=2)
    for kind in (First, Nameless):
        with pytest.raises(ValueError, match=rf"{kind.__name__} is not registered"):
            kvpass.compile(model, policy=kind(window=4), budget=12, backend="eager")
        with pytest.raises(Exception, match=rf"{kind.__name__} is not registered"), kvpass.session():
            torch.compile(torch.sin, backend="kvpass", options={"policy": kind(window=4), "budget": 12})(torch.ones(2))

    @registered
    class Oldest(First):
        name: ClassVar[str] = "oldest"

    fast = kvpass.compile(model, policy=Oldest(window=4), budget=12, backend="eager")
    cache = fast(random_ids(1, 40)).past_key_values
    assert cache.positions.tolist() == [[[[*range(8), *range(36, 40)]] * 2] * 2]


def test_a_score_that_breaks_its_contract(registry):
    """A wrong shape is refused; NaN counts as the lowest score, since no value is read while compiling."""
    wanted: list[Callable[[Observation], object]] = []

    @registered
    class Odd(Policy):
        name: ClassVar[str] = "odd"

        def score(self, obs):
            return wanted[0](obs)

    good, tensors = resolve("snapkv", window=4), torch.randn(3, 2, 1, 2, 40, 8)
    for score, given in (
        (lambda obs: good.score(obs)[:, :1], r"\[1, 1, 36\]"),
        (lambda obs: torch.zeros(1, 4, obs.evictable), r"\[1, 4, 36\]"),
        (lambda obs: None, "NoneType"),
    ):
        wanted[:] = [score]
        with pytest.raises(ValueError, match=rf"policy 'odd': score\(\) gave {given}, must be \[1, 2, 36\]"):
            kvpass.plan("odd", *tensors, budget=12, window=4)
    wanted[:] = [lambda obs: torch.full((1, 2, obs.evictable), math.nan).index_fill(2, torch.tensor([5, 7]), 1.0)]
    keep = kvpass.plan("odd", *tensors, budget=12, window=4).keep
    assert all(head.nonzero()[:, 0].tolist() == [*range(8), *range(36, 40)] for head in keep.flatten(0, 2))
    wanted[:] = [lambda obs: torch.full((1, 2, obs.evictable), -math.inf)]
    assert int(kvpass.plan("odd", *tensors, budget=12, window=4).lengths.sum()) == 12 * 4


@pytest.mark.parametrize("wrong", [math.nan, -1.0, -math.inf])
def test_a_layer_split_that_breaks_its_contract(wrong, registry):
    """A wrong shape is refused; a weight that is none counts as 0, and the total stays exact."""
    weights = {0: torch.tensor([wrong]), 1: torch.tensor([2.0])}

    class Odd:
        budgets, overspend = EntropyLayers.budgets, EntropyLayers.overspend
        parity = "paper"

        def weight(self, obs, scores):
            return weights[obs.layer]

    @registered
    class Uneven(SnapKV):
        name: ClassVar[str] = "uneven"

        def layers(self):
            return Odd()

    tensors = torch.randn(3, 2, 1, 2, 40, 8)
    decision = kvpass.plan("uneven", *tensors, budget=12, window=4)
    assert decision.lengths.sum(2).flatten().tolist() == [2 * 4, 2 * (4 + 16)]
    weights[1] = torch.ones(2)
    with pytest.raises(ValueError, match=r"'uneven': the weight of a layer is \[2\], must be \[1\]"):
        kvpass.plan("uneven", *tensors, budget=12, window=4)


def test_a_policy_that_is_defined_again_is_compiled_again(registry):
    _, fast = compiled_once("llama", layers=2, budget=12, window=4, backend="eager")
    lengths = []
    for evicts in (False, True, False):

        @registered
        class Mine(SnapKV):
            name: ClassVar[str] = "mine"
            decode_rule = Tova.decode_rule if evicts else SnapKV.decode_rule
            evict_during_decode: bool = True

        fast.set_policy("mine", 12, window=4)
        cache = fast(random_ids(1, 40)).past_key_values
        for token in random_ids(1, 3, seed=1).split(1, 1):
            fast(token, past_key_values=cache)
        lengths.append(int(cache.lengths.sum()) / 4)
    assert lengths == [15, 12, 15]


def test_register_policy_refuses_what_cannot_work(registry):
    class Loose(SnapKV):
        name: ClassVar[str] = "loose"

    @policy_class
    class Thief(SnapKV):
        pass

    @policy_class
    class Ranking(SnapKV):
        name: ClassVar[str] = "ranking"

        def rank(self, scores, entries):
            return scores.int()

    def saying(**attributes):
        return policy_class(type("Saying", (SnapKV,), {"name": "saying", **attributes}))

    wrong = {int: "derived from", Loose: "dataclass", Thief: r"'snapkv'.*SnapKV", Ranking: "follows from heads"}
    wrong[saying(inputs={"keys", "query"})] = r"Saying.inputs=.*'query'.*each of .*queries"
    wrong[saying(inputs="keys")] = r"Saying.inputs='keys': must be a set"
    for kind, said in wrong.items():
        with pytest.raises(ValueError, match=said):
            register_policy(kind)


def test_a_class_that_defines_a_score_says_its_inputs_anew_before_a_cache_is_compressed_again(registry):
    def mine(**attributes):
        return register_policy(policy_class(type("Mine", (SnapKV,), {"name": "mine", **attributes})))

    model, options = tiny_model("llama", layers=1), {"budget": 12, "backend": "eager", "recompress": "every_turn"}
    for attributes in ({}, {"score": SnapKV.score, "inputs": {"question"}}):
        kvpass.compile(model, policy=mine(**attributes)(window=4), **options)
    with pytest.raises(ValueError, match="needs more than the window's queries, or its class does not say"):
        kvpass.compile(model, policy=mine(score=SnapKV.score)(window=4), **options)
