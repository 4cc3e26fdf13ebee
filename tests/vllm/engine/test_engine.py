"""The plug-in in vLLM on a CPU: tokens equal those of ``kvpass.compile`` and of stock vLLM. Run by ``make test-vllm``.

One process makes one engine after the other, with kvpass and without: none may take another's backend.
"""

import functools
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tiny import (
    CASES,
    DOCUMENTS,
    MANY,
    NEW,
    QUESTIONS,
    RESULT,
    SHORT,
    SHORT_NEW,
    SHORT_QUESTIONS,
    answer,
    answers,
    compress_documents,
    make_latent_model,
    make_model,
    prompt,
)
from transformers import AutoModelForCausalLM

import kvpass
from kvpass.operands import Attention
from kvpass.ops import reference as reference_ops
from kvpass.vllm import versions
from kvpass.vllm.settings import Settings

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM: make test-vllm")

POLICIES = ["snapkv", "ada_snapkv", "pyramidkv", "lava", "lava_uniform"]
LAVA = {"policy": "lava", "budget": 64, "room": 64}
SMALL = {"policy": "lava", "budget": 40, "room": 16}
NEAR = 0.02
"""Difference of two logits in which a code may decide."""


def differences(found, expected):
    """Return which answers differ before a token that is hardly more likely than another, and how many differ after.

    Kernels round floats in other ways. A number that lies between two codes then becomes the other one, and logits
    change by up to about 0.01.
    """
    assert found.keys() == expected.keys()
    first = {
        name: next((i for i, pair in enumerate(zip(found[name], tokens, strict=True)) if len({*pair}) > 1), None)
        for name, tokens in expected.items()
    }
    margins = {name: (at, expected[name].margins[at]) for name, at in first.items() if at is not None}
    return {name: both for name, both in margins.items() if both[1] > NEAR}, len(margins)


def assert_alike(found, expected, most=2):
    """Answers are the same, but for so many that differ from a token on that is hardly more likely than another."""
    wrong, near = differences(found, expected)
    assert not wrong and near <= most, (wrong, near)


def layout_of(settings):
    return Settings.read({"kvpass": settings}).layout(layers=4, kv_heads=4, head_dim=32)


def units_of(settings, cases):
    """Return the units that requests hold which run together."""
    layout = layout_of(settings)
    documents = [DOCUMENTS[name][0] if name else 0 for name in (case[2] if len(case) == 3 else None for case in cases)]
    sizes = [layout.size_of(n + case[1], NEW, n) for case, n in zip(cases, documents, strict=True)]
    return sum(map(layout.units, sizes))


def by_length(cases, found):
    """Return the tokens that were found for each prompt, by its length."""
    return {str(length): tokens for (_, length), tokens in zip(cases, found, strict=True)}


def expected_in(folder, cases=CASES, policy="lava", entries="model"):
    """Return the tokens of ``kvpass`` for each prompt, by its length."""
    return by_length(cases, answers(folder, [prompt(*case) for case in cases], NEW, policy, 64, entries))


def asked(folder, into, cases, new, budget=64, entries="model"):
    """Return what ``compress_documents`` does, and among the tokens those of the cases that are prompts."""
    named, expected, held = compress_documents(folder, into, cases, new, entries)
    prompts = [case for case in cases if len(case) == 2]
    found = answers(folder, [prompt(*case) for case in prompts], new, "lava", budget, entries)
    return named, expected | by_length(prompts, found), held


class Scenarios:
    """A process that runs ``scenarios.py``; a new one after a failure."""

    def __init__(self, folder, log):
        self.folder, self.log, self.process = folder, log, None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def __call__(self, name, *arguments):
        """Run a scenario; return its result."""
        if self.process is None:
            command = [sys.executable, str(Path(__file__).parent / "scenarios.py"), str(self.folder)]
            pipe = subprocess.PIPE
            with self.log.open("w") as log:
                self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True)
        try:
            print(json.dumps([name, arguments]), file=self.process.stdin, flush=True)
            for line in self.process.stdout:
                if line.startswith(RESULT):
                    return json.loads(line.removeprefix(RESULT))
            raise AssertionError(self.log.read_text()[-4000:])
        except BaseException:
            self.__exit__()
            raise


@pytest.fixture(scope="module")
def ask(folder, tmp_path_factory):
    """A function of the name of a scenario and its arguments."""
    with Scenarios(folder, tmp_path_factory.mktemp("engines") / "log") as scenarios:
        yield scenarios


@pytest.fixture(scope="module")
def ask_biased(tmp_path_factory):
    """The folder of a model whose keys have a mean, and such a function."""
    folder = tmp_path_factory.mktemp("biased")
    make_model(folder, key_bias=2.0)
    with Scenarios(folder, folder / "log") as scenarios:
        yield folder, scenarios


@pytest.fixture
def ask_alone(folder, tmp_path):
    """The same in a process of the test's own."""
    with Scenarios(folder, tmp_path / "log") as scenarios:
        yield scenarios


@pytest.fixture(scope="module")
def reference(folder):
    """A function: answers of kvpass.compile, each prompt alone, by the prompt's length."""

    @functools.cache
    def reference(policy=None, budget=None, short=False, entries="model"):
        cases, new = (SHORT, SHORT_NEW) if short else (CASES, NEW)
        return by_length(cases, answers(folder, [prompt(*case) for case in cases], new, policy, budget, entries))

    return reference


@pytest.mark.parametrize("kvpass", [{"policy": "lava", "budget": 1100, "room": 64}, None])
def test_without_settings_or_with_a_budget_above_the_prompt_it_is_stock(ask, reference, kvpass):
    found = ask("ways", kvpass)
    assert found.pop("preempted") == 8
    for way, tokens in found.items():
        assert tokens == reference(), way


@pytest.mark.parametrize("budget", [64, 128])
@pytest.mark.parametrize("policy", POLICIES)
def test_tokens_equal_kvpass_alone_together_joined_and_preempted(ask, reference, policy, budget):
    expected = reference(policy, budget)
    assert expected != reference(), "a budget that changes no token shows nothing"
    found = ask("ways", LAVA | {"policy": policy, "budget": budget})
    assert found.pop("preempted") == 8
    for way, tokens in found.items():
        assert tokens == expected, way


@pytest.mark.parametrize(("policy", "tokens"), [("snapkv", 51), ("lava", 40), ("lava", 51), ("lava", 300)])
def test_prompts_in_chunks_get_the_tokens_of_whole_ones_and_nobody_waits(ask, reference, policy, tokens):
    """40 are one token of each of 8 requests and the window; of 51 a last chunk would often be shorter than it."""
    found = ask("chunks", LAVA | {"policy": policy}, tokens, "")
    assert found["tokens"] == reference(policy, 64)
    assert (found["most"], found["waited"]) == (1, []) and found["free"][0] == found["free"][1]


@pytest.mark.parametrize("then", ["preempt", "preempt late", "cancel"])
def test_a_prompt_may_be_preempted_or_cancelled_between_its_chunks(ask, reference, then):
    """Late, what comes back is read in chunks of 40 tokens, some of which are of the answer so far alone."""
    found = ask("chunks", LAVA, 40, then)
    assert found["tokens"] == reference("lava", 64) and found["then"] == "", "it did not happen"
    assert found["most"] == 1 and found["free"][0] == found["free"][1]
    assert found["waited"] == [] if then == "cancel" else found["preempted"] >= 2


@pytest.mark.parametrize(("entries", "then"), [("int8", ""), ("rot3", "cancel"), ("rot4", "preempt")])
def test_prompts_in_chunks_become_the_codes_of_whole_ones(ask_biased, entries, then):
    folder, ask = ask_biased
    expected = expected_in(folder, entries=entries)
    found = ask("chunks", LAVA | {"entries": entries}, 64, then)
    assert_alike(found["tokens"], expected)
    assert found["most"] == 1 and found["then"] == ""


def test_a_prompt_that_waits_takes_of_the_memory_that_the_user_gives(ask):
    chunks, layout = {"enable_chunked_prefill": True}, layout_of(LAVA)
    unit, staged = 8 * 4 * 4 * 2 * 32 * 4, 2048 // 8  # bytes: 8 entries of each of 4 x 4 heads
    units, needed = 64 * 2**20 // unit, 2 + staged + layout.units(layout.largest)  # vLLM counts its block 0 once more
    assert [ask("blocks", LAVA, options) for options in ({}, chunks)] == [[units, 1], [units, 1 + staged]]
    for more, said in ((0, "started"), (-1, "is needed")):
        assert said in ask("refused", LAVA, chunks | {"kv_cache_memory_bytes": (needed + more) * unit})


@pytest.mark.parametrize(
    ("policy", "entries"), [("snapkv", "int8"), ("lava", "fp8"), ("lava", "rot4"), ("snapkv", "rot3"), ("lava", "rot2")]
)
def test_tokens_of_codes_equal_kvpass_alone_together_joined_and_preempted(ask_biased, policy, entries):
    folder, ask = ask_biased
    expected, of_floats = (expected_in(folder, policy=policy, entries=how) for how in (entries, "model"))
    assert differences(expected, of_floats)[0], "a format that changes no token shows nothing"
    found = ask("ways", LAVA | {"policy": policy, "entries": entries})
    assert found.pop("preempted") == 8
    for tokens in found.values():
        assert_alike(tokens, expected)


@pytest.mark.parametrize(
    ("entries", "options"),
    [
        ("model", {}),
        ("model", {"enable_chunked_prefill": True, "max_num_batched_tokens": 44, "max_num_seqs": 12}),
        ("rot4", {}),
    ],
)
def test_questions_about_documents_get_the_tokens_of_kvpass_and_hold_documents_once(
    ask, folder, tmp_path, entries, options
):
    """Documents compressed by other policies than the engine's, among prompts that the engine compresses."""
    named, expected, held = asked(folder, tmp_path, QUESTIONS, NEW, entries=entries)
    settings = {"policy": "lava", "budget": 64, "room": 120, "entries": entries, "documents": named}
    found = ask("documents", settings, QUESTIONS, NEW, options)
    preempted, blocks = found.pop("preempted"), found.pop("blocks")
    each = 2 * 32 if entries == "model" else 2 * 32 // 2  # numbers of an entry, or bytes
    assert preempted >= 2 and found.pop("left") == 0 and found.pop("numbers") == held * each
    if not options:
        assert preempted == len(QUESTIONS) and blocks == units_of(settings, QUESTIONS)
    for tokens in found.values():
        assert_alike(tokens, expected, most=0 if entries == "model" else 2)


PROTECTED = [(1, 300, None), (1, 300, 20), (1, 300, 28), (5, 1000, 16), (2, 40, 40)]
"""Seed and length of prompts, and how many first tokens are protected; three prompts are the same."""


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("snapkv", {}),
        ("lava", {}),
        ("pyramidkv", {"enable_chunked_prefill": True, "max_num_batched_tokens": 64, "max_num_seqs": 8}),
        ("lava", {"tensor_parallel_size": 2}),
    ],
)
def test_every_head_keeps_what_kvpass_keeps_of_prompts_whose_first_tokens_are_protected(ask, folder, policy, options):
    found = ask("protected", LAVA | {"policy": policy}, PROTECTED, options)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    fast = kvpass.compile(model, policy=policy, budget=64, backend="eager")
    tokens, heads = {}, []
    for number, (seed, length, first) in enumerate(PROTECTED):
        protect = None if first is None else [(0, first)]
        tokens[str(number)] = answer(fast, prompt(seed, length), NEW, protect=protect)
        positions = fast.compress(torch.tensor([prompt(seed, length)]), protect=protect).positions[0]
        heads.append([[p for p in head.tolist() if 0 <= p < length - 32] for layer in positions for head in layer])
    assert found["alone"] == found["resumed"] == tokens
    assert found["preempted"] >= 3 if "enable_chunked_prefill" in options else found["preempted"] == len(PROTECTED)
    assert tokens["0"] != tokens["1"] != tokens["2"] != tokens["0"], "what is protected changes no token"
    if "tensor_parallel_size" not in options:
        assert found["kept"] == heads
        assert [all({*range(20)} <= {*head} for head in kept) for kept in found["kept"][:3]] == [False, True, True]


def test_requests_keep_their_codes_while_the_engine_is_paused(ask_biased):
    folder, ask = ask_biased
    expected = expected_in(folder, CASES[1:5], entries="rot4")
    found = ask("paused", LAVA | {"entries": "rot4"})
    assert_alike(found, expected, 1)


def test_a_compressed_cache_holds_many_more_requests(ask, folder):
    found, stock = ask("capacity", LAVA, 2), ask("capacity", None, 1)
    assert found["running"] >= 120 and stock["running"] == 15
    forth, back = found["answers"]
    assert forth == back and len({tuple(tokens) for tokens in forth.values()}) == MANY
    sample = range(3, MANY, 12)
    alone = answers(folder, [prompt(seed, 1000) for seed in sample], NEW, "lava", 64)
    assert [forth[str(seed)] for seed in sample] == alone
    assert found["free"][0] == found["free"][1]  # no block leaked


def test_short_prompts_hold_what_they_need(ask, folder):
    """One of 64 tokens with 40 new ones: 112 entries a head, 16 pages of stock vLLM; the largest block has 513.

    Blocks of codes hold more again: fp32 entries of 32 numbers take 256 bytes, those of rot4 40."""
    floats, codes = (ask("blocks", LAVA | {"entries": entries}, {})[0] for entries in ("model", "rot4"))
    assert codes / floats == pytest.approx(256 / 40, rel=0.02)
    settings = {"policy": "lava", "budget": 256, "room": 256}
    found, stock = ask("capacity", settings, 1, 64), ask("capacity", None, 1, 64)
    assert found["running"] == 142 and stock["running"] == 127
    sample = range(3, MANY, 20)
    alone = answers(folder, [prompt(seed, 64) for seed in sample], NEW)
    assert [found["answers"][0][str(seed)] for seed in sample] == alone
    assert found["free"][0] == found["free"][1]


def test_blocks_of_all_sizes_share_the_memory_of_four_of_the_largest(ask, folder):
    lengths = [64, 1000, 1, 300, 33, 20, 777, 150, 40, 500, 31, 90, 1000, 5, 260, 129]
    cases = [[30 + i, length, (40, 3, 20, 12, 1)[i % 5]] for i, length in enumerate(lengths * 2)]
    found = ask("mixed", {"policy": "lava", "budget": 128, "room": 128}, cases, 5, 9)
    expected = answers(folder, [prompt(*case[:2]) for case in cases], NEW, "lava", 128)
    expected = {str(number): tokens[: cases[number][2]] for number, tokens in enumerate(expected)}
    assert found["tokens"] == expected
    assert found["preempted"] >= 5 and found["free"][0] == found["free"][1]
    assert max(map(len, found["held"])) >= 8 and all(sum(held) <= found["free"][0] for held in found["held"])


CHUNKS = {"enable_chunked_prefill": True, "max_num_batched_tokens": 64, "max_num_seqs": 8}


@pytest.mark.parametrize(
    ("policy", "options"), [*((policy, {}) for policy in POLICIES if policy != "lava_uniform"), ("lava", CHUNKS)]
)
def test_two_processes_keep_what_one_keeps(ask, reference, policy, options):
    found, preempted = ask("two_processes", LAVA | {"policy": policy}, CASES, options)
    assert found == reference(policy, 64) and (preempted >= 2 if options else preempted == 8)


def test_two_processes_keep_as_codes_what_one_keeps_and_continue_documents(ask, reference, folder, tmp_path):
    found, preempted = ask("two_processes", LAVA | {"entries": "rot4"})
    assert_alike(found, reference("lava", 64, entries="rot4"))
    assert preempted == 8
    cases = [case for case in QUESTIONS if len(case) == 3]
    named, expected, _ = compress_documents(folder, tmp_path, cases, NEW)
    assert ask("two_processes", {"room": 120, "documents": named}, cases) == [expected, len(cases)]


def test_what_runs_on_cuda_continues_documents_in_the_interpreter(ask_alone, folder, tmp_path, monkeypatch):
    named, expected, _ = asked(folder, tmp_path, SHORT_QUESTIONS, SHORT_NEW, budget=40)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    settings = SMALL | {"room": 32, "documents": named}
    found, preempted = ask_alone("cuda_kernels", settings, False, SHORT_QUESTIONS)
    assert found == expected and preempted == 3


IN_CHUNKS = {"enable_chunked_prefill": True, "max_num_batched_tokens": 37, "max_num_seqs": 4}


@pytest.mark.parametrize(
    ("graphs", "options"), [(False, {}), (True, {}), (False, IN_CHUNKS)], ids=["steps", "graphs", "chunks"]
)
def test_what_runs_on_cuda_gives_the_same_tokens_in_the_interpreter(ask_alone, reference, graphs, options, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    found, preempted = ask_alone("cuda_kernels", SMALL, graphs, SHORT, options)
    assert found == reference("lava", 40, short=True) and (preempted >= 2 if options else preempted == 3)


def test_what_runs_on_cuda_holds_codes_in_the_interpreter(ask_alone, reference, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    found, preempted = ask_alone("cuda_kernels", SMALL | {"entries": "rot4"}, False)
    assert differences(found, reference("lava", 40, short=True, entries="rot4")) == ({}, 0) and preempted == 3


@pytest.mark.parametrize("entries", ["model", "rot4"])
def test_an_answer_ends_with_length_when_its_room_is_used_up(ask, folder, entries):
    """Of a policy without a window, which has no slots for the prompt's last tokens but one."""
    expected = answers(folder, [prompt(4, 1)], 21, "knorm", 64, entries)
    settings = {"policy": "knorm", "budget": 64, "room": 20, "entries": entries}
    assert ask("long_answer", settings) == [*expected, "length"]


SHORT_STEPS = {"max_num_batched_tokens": 39, "max_num_seqs": 8}
SUMS = {"policy": "vatp", "indicator": "h2o", "evict_during_decode": False}
FOR_ANOTHER = {"policy": "duo_attention", "head_map": [[1, 0, 0, 0]] * 4, "window": 8, "sinks": 4, "of_model": "digest"}


@pytest.mark.parametrize(
    ("policy", "options", "flag"),
    [
        ({}, {"enable_prefix_caching": True}, "--no-enable-prefix-caching"),
        ({}, {"enable_chunked_prefill": True} | SHORT_STEPS, "raise --max-num-batched-tokens"),
        (SUMS, {"enable_chunked_prefill": True}, "--no-enable-chunked-prefill"),
        (FOR_ANOTHER, {}, "made for another model"),
    ],
)
def test_flags_that_are_not_exact_and_a_policy_for_another_model_are_refused_at_start(ask, policy, options, flag):
    assert flag in ask("refused", LAVA | policy, options)


def test_a_model_whose_caches_would_not_be_compressed_is_refused_at_start(ask_alone, tmp_path):
    """Latent attention has backends of its own, which vLLM takes whatever is registered."""
    make_latent_model(tmp_path / "latents")
    settings = {"policy": "lava", "budget": 40, "room": 10}
    named, unnamed = ask_alone("refused_latents", settings, str(tmp_path / "latents"))
    assert "does not support latent attention" in named
    assert "would not compress all caches" in unnamed and "MLAAttentionSpec" in unnamed


def test_both_model_runners_take_the_plug_in_and_beam_search_is_refused(ask):
    assert ask("loaded") == [True, True]
    assert "beam search" in ask("beams", LAVA)


@pytest.mark.parametrize("sinks", [None, torch.tensor([3.0, -2.0, 0.0, 1.0])])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize(("length", "dim"), [(2, 32), (129, 80)])
@pytest.mark.parametrize("before", [0, 70])
def test_the_kernel_for_prompts_agrees_with_eager_attention(before, length, dim, softcap, sinks):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, before + length, heads, dim).transpose(1, 2) for heads in (4, 2, 2))
    call = Attention(q[:, :, before:], k, v, 0.3, softcap, sinks)
    expected, _ = reference_ops.attend_prompt(call, torch.zeros(1, dtype=torch.int64))
    out = torch.empty(length, 4, dim)
    versions.attend_prompt(call, out)
    torch.testing.assert_close(out, expected[0].transpose(0, 1), atol=2e-5, rtol=2e-5)
