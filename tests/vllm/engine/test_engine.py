"""The plug-in in vLLM on a CPU: tokens equal those of ``kvpass.compile`` and of stock vLLM. Run by ``make test-vllm``.

Each configuration has a process of its own, as vLLM keeps state in its modules.
"""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM: make test-vllm")

POLICIES = ["snapkv", "ada_snapkv", "pyramidkv", "lava", "lava_uniform"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("model")


def ask(name, folder, *arguments):
    """Run one function of ``scenarios.py``; return the JSON that it prints last."""
    command = [sys.executable, str(Path(__file__).parent / "scenarios.py"), name, str(folder), json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def full(folder):
    return ask("reference", folder, None, None)


@pytest.mark.parametrize("budget", [64, 128])
@pytest.mark.parametrize("policy", POLICIES)
def test_tokens_equal_kvpass_alone_together_joined_and_preempted(folder, full, policy, budget):
    expected = ask("reference", folder, policy, budget)
    assert expected != full, "a budget that changes no token shows nothing"
    found = ask("ways", folder, {"policy": policy, "budget": budget, "room": 64})
    assert found.pop("preempted") == 8
    for way, tokens in found.items():
        assert tokens == expected, way


@pytest.mark.parametrize("kvpass", [None, {"policy": "lava", "budget": 1100, "room": 64}])
def test_without_settings_or_with_a_budget_above_the_prompt_it_is_stock(folder, full, kvpass):
    found = ask("ways", folder, kvpass)
    assert found.pop("preempted") == 8
    for way, tokens in found.items():
        assert tokens == full, way


def test_a_compressed_cache_holds_many_more_requests(folder):
    peak, answers, free = ask("capacity", folder, {"policy": "lava", "budget": 64, "room": 64})
    stock_peak, _, _ = ask("capacity", folder, None)
    assert peak >= 120 and stock_peak <= 20
    assert answers == [160, 1]  # none lost, all equal
    assert free[0] == free[1]  # no block leaked


def test_engines_of_one_process_do_not_take_each_others_backend(folder, full):
    compressed = ask("reference", folder, "lava", 64)
    kvpass = {"policy": "lava", "budget": 64, "room": 64}
    assert ask("in_turn", folder, [kvpass, None, kvpass]) == [compressed, full, compressed]


def test_an_answer_ends_with_length_when_its_room_is_used_up(folder):
    assert ask("long_answer", folder, {"policy": "lava", "budget": 64, "room": 20}) == [21, "length"]


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"enable_chunked_prefill": True}, "--no-enable-chunked-prefill"),
        ({"enable_prefix_caching": True}, "--no-enable-prefix-caching"),
    ],
)
def test_flags_that_are_not_exact_are_refused_at_start(folder, options, flag):
    assert flag in ask("refused", folder, {"policy": "lava", "budget": 64, "room": 64}, options)
