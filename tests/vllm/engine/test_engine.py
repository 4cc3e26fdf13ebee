"""The plug-in in vLLM on a CPU: tokens equal those of ``kvpass.compile`` and of stock vLLM. Run by ``make test-vllm``.

Each configuration has a process of its own, as vLLM keeps state in its modules.
"""

import functools
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from tiny import CASES, NEW, SHORT, SHORT_NEW, answers, prompt

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM: make test-vllm")

POLICIES = ["snapkv", "ada_snapkv", "pyramidkv", "lava", "lava_uniform"]


def ask(name, folder, *arguments):
    """Run one function of ``scenarios.py``; return the JSON that it prints last."""
    command = [sys.executable, str(Path(__file__).parent / "scenarios.py"), name, str(folder), json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def reference(folder):
    """A function: answers of kvpass.compile, each prompt alone, by the prompt's length."""

    @functools.cache
    def reference(policy=None, budget=None, short=False):
        cases, new = (SHORT, SHORT_NEW) if short else (CASES, NEW)
        found = answers(folder, [prompt(*case) for case in cases], new, policy, budget)
        return {str(length): tokens for (_, length), tokens in zip(cases, found, strict=True)}

    return reference


@pytest.mark.parametrize("budget", [64, 128])
@pytest.mark.parametrize("policy", POLICIES)
def test_tokens_equal_kvpass_alone_together_joined_and_preempted(folder, reference, policy, budget):
    expected = reference(policy, budget)
    assert expected != reference(), "a budget that changes no token shows nothing"
    found = ask("ways", folder, {"policy": policy, "budget": budget, "room": 64})
    assert found.pop("preempted") == 8
    for way, tokens in found.items():
        assert tokens == expected, way


@pytest.mark.parametrize("kvpass", [None, {"policy": "lava", "budget": 1100, "room": 64}])
def test_without_settings_or_with_a_budget_above_the_prompt_it_is_stock(folder, reference, kvpass):
    found = ask("ways", folder, kvpass)
    assert found.pop("preempted") == 8
    for way, tokens in found.items():
        assert tokens == reference(), way


def test_a_compressed_cache_holds_many_more_requests(folder, reference):
    found, stock = (ask("capacity", folder, given) for given in ({"policy": "lava", "budget": 64, "room": 64}, None))
    assert found["running"] >= 120 and stock["running"] <= 20
    assert found["answers"] == 160 * [reference("lava", 64)["1000"]]
    assert found["free"][0] == found["free"][1]  # no block leaked


@pytest.mark.parametrize("policy", ["pyramidkv", "lava"])
def test_two_processes_keep_what_one_keeps(folder, reference, policy):
    found, preempted = ask("two_processes", folder, {"policy": policy, "budget": 64, "room": 64})
    assert found == reference(policy, 64) and preempted == 8


@pytest.mark.parametrize("graphs", [False, True])
def test_what_runs_on_cuda_gives_the_same_tokens_in_the_interpreter(folder, reference, graphs, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    found, preempted = ask("cuda_kernels", folder, {"policy": "lava", "budget": 40, "room": 16}, graphs)
    assert found == reference("lava", 40, short=True) and preempted == 3


def test_both_model_runners_take_the_plug_in(folder):
    assert ask("loaded", folder) == [True, True]


def test_engines_of_one_process_do_not_take_each_others_backend(folder, reference):
    compressed, full = reference("lava", 64), reference()
    kvpass = {"policy": "lava", "budget": 64, "room": 64}
    assert ask("in_turn", folder, [kvpass, None, kvpass]) == [compressed, full, compressed]


def test_an_answer_ends_with_length_when_its_room_is_used_up(folder):
    """Of a policy without a window, which has no slots for the prompt's last tokens but one."""
    expected = answers(folder, [prompt(4, 1)], 21, "knorm", 64)
    assert ask("long_answer", folder, {"policy": "knorm", "budget": 64, "room": 20}) == [*expected, "length"]


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"enable_chunked_prefill": True}, "--no-enable-chunked-prefill"),
        ({"enable_prefix_caching": True}, "--no-enable-prefix-caching"),
    ],
)
def test_flags_that_are_not_exact_are_refused_at_start(folder, options, flag):
    assert flag in ask("refused", folder, {"policy": "lava", "budget": 64, "room": 64}, options)
