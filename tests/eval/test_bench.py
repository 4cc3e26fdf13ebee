"""The bench on micro models: batches, the bound, memory that does not suffice, and the helpers it measures with."""

import gc
import json
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from eval_models import model_folder
from kvpass.eval.bench import measure as bench_measure
from kvpass.eval.bench import run as bench
from kvpass.eval.bench import systems as bench_systems
from kvpass.eval.bench.measure import profile_prefill, weight_bytes
from kvpass.eval.bench.report import show
from kvpass.eval.bench.run import Bench
from kvpass.eval.bench.settings import BenchSettings, build, find_model
from kvpass.eval.bench.systems import HfEager, HfStatic, Kvpass
from kvpass.eval.options import BenchOptions
from kvpass.policies import resolve
from pairwise import quick_rows

pytestmark = pytest.mark.usefixtures("compile_once")


@pytest.fixture(autouse=True)
def small_copies(monkeypatch):
    gc.freeze()  # the bench looks for garbage after every turn
    monkeypatch.setitem(bench_measure._COPY_BYTES, "cpu", 2**22)
    monkeypatch.setattr(bench_measure, "_LEAST_SECONDS", 0.001)


LAVA = "lava:window=8"
H2O = "h2o:window=8"


def settings(model, **changes):
    usual = {
        "model": model, "contexts": "48", "budget": "16", "policies": LAVA,
        "systems": "hf-eager,full", "new_tokens": 3, "repeats": 1, "backend": "eager",
    }  # fmt: skip
    return BenchOptions(**usual | changes)


def named(result, run=0):
    """Records of the systems of a run, by name."""
    return {record["name"]: record for record in result["runs"][run]["systems"]}


@pytest.mark.exhaustive  # five seconds
def test_a_batch_by_its_own_prompts_and_by_one_that_is_shared(micro):
    entry = 2 * 8 * 4
    for shared in (False, True):
        asked = settings(micro, batches="2", systems="hf-eager,hf-static,full", shared_prompt=shared)
        systems = named(Bench(asked).run())
        assert list(systems) == ["hf-eager", "hf-static", LAVA, "full"]
        for name in ("hf-eager", "hf-static", "full"):
            assert systems[name]["attended_bytes"] == 2 * (48 + 3) * 2 * entry, name
        assert systems[LAVA]["attended_bytes"] == 2 * (16 + 3) * 2 * entry
        assert systems[LAVA]["tokens_per_s"] == pytest.approx(2e3 / systems[LAVA]["decode_ms"]["median"])


def test_dtype_of_the_weights_and_bytes_of_an_entry(micro):
    """What the result says of both in float32, test_cli.py compares."""
    made = Bench(settings(micro, dtype="bf16"))
    assert made.model.dtype == torch.bfloat16
    assert made.geometry.token_bytes() == 2 * 2 * 8 * 2


def test_formats_of_kept_entries_are_systems_of_their_own(micro):
    systems = named(Bench(settings(micro, entries="model,int8")).run())
    assert list(systems) == ["hf-eager", LAVA, f"int8 {LAVA}", "full"]
    assert systems[LAVA]["attended_bytes"] == 2 * (16 + 3) * 2 * 8 * 4
    assert systems[f"int8 {LAVA}"]["attended_bytes"] == 2 * (16 + 3) * 2 * (8 + 4)
    with pytest.raises(ValueError, match="entries='': must be one or several of model, int8"):
        BenchSettings(settings(micro, entries=""))


def fails(monkeypatch, kind, message, method="prefill"):
    """Have transformers' eager cache fail; returns weak references to the caches that it had."""
    caches = []

    def broken(self, *arguments):
        caches.extend(weakref.ref(cache) for cache in arguments[2:])
        raise kind(message)

    monkeypatch.setattr(bench.HfEager, method, broken)
    return caches


def test_a_system_that_runs_out_of_memory_is_named_and_the_others_go_on(micro, monkeypatch):
    fails(monkeypatch, torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 9 GiB.\nmore")
    result = Bench(settings(micro)).run()
    eager, lava, full = result["runs"][0]["systems"]
    assert eager == {"name": "hf-eager", "failure": "CUDA out of memory. Tried to allocate 9 GiB."}
    assert "hf-eager" not in lava["decode_speedup"] and lava["decode_speedup"]["full"] > 0
    assert full["decode_ms"]["median"] > 0
    text = show(result).markdown()
    assert "| hf-eager | failed |" in text
    assert "hf-eager: CUDA out of memory. Tried to allocate 9 GiB." in text


def test_what_has_been_measured_is_saved_after_every_turn(micro):
    saved = []
    Bench(settings(micro, contexts="32,48", repeats=2, systems="")).run(
        lambda result: saved.append(json.loads(json.dumps(result)))
    )
    assert [len(result["runs"]) for result in saved] == [1, 1, 2, 2]
    assert [result["complete"] for result in saved] == [False] * 3 + [True]
    assert [len(result["runs"][-1]["systems"][0]["decode_ms"]["all"]) for result in saved] == [1, 2, 1, 2]


def test_a_system_is_measured_and_saved_before_the_next_one_compiles(micro, monkeypatch):
    said, prefill = [], bench.Kvpass.prefill

    def logged(self, ids):
        said.append(self.name)
        return prefill(self, ids)

    monkeypatch.setattr(bench.Kvpass, "prefill", logged)
    Bench(settings(micro, systems="full")).run(lambda result: said.append("saved"))
    assert said == [LAVA, LAVA, LAVA, "saved", "full", "full", "saved"], "a first run, a repeat, scoring"


def test_a_shared_prompt_is_read_once_for_all_batches_and_copied_for_each_row(micro, monkeypatch):
    said, prefill = [], bench.Kvpass.prefill
    monkeypatch.setattr(bench.Kvpass, "prefill", lambda self, ids: (said.append(self.name), prefill(self, ids))[1])
    asked = settings(
        micro, systems="full", policies=f"{LAVA},{H2O}", batches="1,3", contexts="32,48", shared_prompt=True
    )
    made = Bench(asked)
    result = made.run(lambda result: said.append("saved"))
    turns = [[name] * (3 if name != "full" else 2) + ["saved"] * 2 for name in (LAVA, H2O, "full")]
    assert said == [word for turn in turns * 2 for word in turn], "a first run, a repeat, scoring"
    assert [(run["context"], run["batch"]) for run in result["runs"]] == [(32, 1), (32, 3), (48, 1), (48, 3)]
    assert all(system.prefilled is None for system in made.kvpass_systems)
    for name in (LAVA, "full"):
        one, three = (named(result, run)[name] for run in (2, 3))
        assert three["attended_bytes"] == 3 * one["attended_bytes"]
        assert three["cache_bytes"] > 2.9 * one["cache_bytes"]
        assert three["prefill_s"] == one["prefill_s"]


def test_the_bound_of_many_rows_is_that_of_the_products(micro, monkeypatch):
    limits = {"copy_bandwidth": 1e9, "matmul_operations": 2e6}
    monkeypatch.setattr(bench, "ceilings", lambda device, dtype: limits)
    result = Bench(settings(micro, systems="", batches="1,2")).run()
    weights = result["model"]["step_weight_bytes"]
    for run, batch in ((0, 1), (1, 2)):
        record = named(result, run)[LAVA]
        bound = 1e3 * (batch * weights / 4 / 1e6 + record["attended_bytes"] / 1e9)
        assert record["share_of_bound"] * record["decode_ms"]["median"] == pytest.approx(bound)
    limits["matmul_operations"] = 1e15
    (record,) = named(Bench(settings(micro, systems="")).run()).values()
    bound = 1e3 * (weights + record["attended_bytes"]) / 1e9
    assert record["share_of_bound"] * record["decode_ms"]["median"] == pytest.approx(bound)


def test_any_other_failure_is_raised_when_the_others_are_measured_and_leaves_no_cache(micro, monkeypatch):
    saved, held = [], []
    caches = fails(monkeypatch, RuntimeError, "no", "step")

    def save(result):
        saved.append(json.loads(json.dumps(result)))
        held.append([cache() for cache in caches])

    with pytest.raises(RuntimeError, match="1 failed, first hf-eager: RuntimeError: no"):
        Bench(settings(micro)).run(save)
    eager, *others = saved[-1]["runs"][0]["systems"]
    assert eager == {"name": "hf-eager", "failure": "RuntimeError: no"} and not saved[-1]["complete"]
    assert others and all(record["decode_ms"]["median"] > 0 for record in others)
    assert all(cache is None for at_once in held for cache in at_once) and len(held[-1]) == 1


def test_no_memory_for_the_profiler_leaves_the_timings_that_were_taken(micro, monkeypatch):
    def full(run, device):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(bench_systems, "profile_prefill", full)
    compressed = named(Bench(settings(micro)).run())[LAVA]
    assert compressed["failure"] is None and compressed["scoring"] is None and compressed["decode_ms"]["median"] > 0


def test_prefills_are_measured_beside_each_other(micro, micro_sizes):
    sizes = micro_sizes | {"model_type": "llama", "num_hidden_layers": 3, "max_position_embeddings": 2048}
    Path(micro).write_text(json.dumps(sizes))
    text = "lava:window=8,snapkv:window=8"
    prefill = "full,minference:vertical_size=30,slash_size=100"
    given = settings(micro, policies=text, prefill=prefill, systems="", contexts="600", budget="40")
    systems = named(Bench(given).run())
    assert list(systems) == [
        f"{prefill}{policy}:window=8"
        for policy in ("lava", "snapkv")
        for prefill in ("", "minference:vertical_size=30,slash_size=100 ")
    ]
    for name, record in systems.items():
        found = record["attention"]
        assert 0 < found["attend_s"] < record["prefill_s"]["median"] * 10
        if name.startswith("minference"):
            assert found["select_s"] > 0 and 0.1 < found["blocks"] < 1 and 0.1 < found["covered"] < 1
        else:
            assert found["select_s"] == 0 and found["blocks"] == found["covered"] == 1


def test_prompts_of_a_text_are_its_first_tokens(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("Some words. " * 120)
    with pytest.raises(ValueError, match="'tiny' has random weights and no tokenizer"):
        Bench(settings("tiny", text=text))
    folder = model_folder()
    bench = Bench(settings(folder, text=text, contexts="300", systems=""))
    ids = bench.settings.ids(bench.options, 2, 300)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert ids.shape == (2, 300) and torch.equal(ids[0], ids[1])
    assert ids[0].tolist() == tokenizer(text.read_text()).input_ids[:300]
    with pytest.raises(ValueError, match="tokens are fewer than a prompt of 1000"):
        Bench(settings(folder, text=text, contexts="1000", systems=""))


def test_options_of_a_policy_reach_it_and_are_part_of_its_name(micro):
    made = Bench(settings(micro, policies="cake:tau1=1.6,tau2=0.4,window=8,tova", systems=""))
    assert list(named(made.run())) == ["cake:tau1=1.6,tau2=0.4,window=8", "tova"]
    cake, tova = (system.model.policy for system in made.kvpass_systems)
    assert (cake.tau1, cake.window, tova.window) == (1.6, 8, 0)


def test_models_whose_layers_share_no_budget_are_refused(micro_sizes, tmp_path):
    path = tmp_path / "sliding.json"
    path.write_text(json.dumps({"model_type": "mistral", "sliding_window": 16, **micro_sizes}))
    with pytest.raises(ValueError, match="a mistral model with sliding windows"):
        Bench(settings(str(path)))


HYBRID = {
    "model_type": "qwen3_5_text", "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}  # fmt: skip
STATES = ((2 * 2 + 4) * 8 * 4 + 4 * 8 * 8) * 4
"""Bytes of its convolution, 4 columns wide, and of its recurrence."""


@pytest.fixture
def hybrid(micro_sizes, tmp_path):
    path = tmp_path / "hybrid.json"
    path.write_text(json.dumps({**micro_sizes, **HYBRID}))
    return str(path)


@pytest.mark.parametrize(
    ("kind", "static"), quick_rows([("micro", True), ("hybrid", False), ("hybrid", True)], [("hybrid", False)])
)
def test_the_same_answer_whatever_the_cache_is_repeated_in_and_bytes_count_states(kind, static, request):
    model = build(find_model(request.getfixturevalue(kind)), 0)
    ids, entry, states = torch.randint(64, (1, 40)), 2 * 2 * 8 * 4, STATES * (kind == "hybrid")
    assert bench.geometry_of(model).token_bytes() == entry
    policies = resolve("full"), resolve("lava", window=8)
    full, lava = (Kvpass(model, policy.name, policy=policy, budget=16, backend="eager") for policy in policies)
    expected = None
    for system in (HfEager(model), *[HfStatic(model, 48, "eager")] * static, full, lava):
        with torch.no_grad():
            logits, cache = system.prefill(ids)
            cache = system.decoding_cache(cache, 3)
            token = logits[:, -1].argmax(-1, keepdim=True).repeat_interleave(3, 0)
            logits = system.step(token, 40, cache)
        assert logits.shape[0] == 3
        entries = 16 + 1 if system is lava else 40 + 1
        assert system.attended_bytes(cache, 41) == 3 * (entries * entry + states)
        assert system.nbytes(cache) >= 3 * (entries * entry + states * (2 if isinstance(system, Kvpass) else 1))
        if system is not lava:
            expected = logits if expected is None else expected
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_weights_that_a_step_reads(micro_sizes):
    def model(**options):
        return LlamaForCausalLM(LlamaConfig(**micro_sizes, **options))

    apart, tied = model(tie_word_embeddings=False), model(tie_word_embeddings=True)
    table = 64 * 32 * 4
    assert weight_bytes(apart) == apart.num_parameters() * 4 - table
    assert weight_bytes(tied) == tied.num_parameters() * 4 == weight_bytes(apart)
    experts = MixtralForCausalLM(MixtralConfig(**micro_sizes, num_local_experts=2))
    assert weight_bytes(experts) is None


@pytest.mark.parametrize(
    ("name", "parameters"), [("llama-3.1-8b", 8.03e9), ("qwen3-8b", 8.19e9), ("mistral-7b", 7.248e9)]
)
def test_published_shapes_have_their_published_sizes(name, parameters):
    model = build(find_model(name), 0, "meta")
    assert model.num_parameters() == pytest.approx(parameters, rel=1e-3)
    assert not getattr(model.config, "sliding_window", None)


def test_a_folder_brings_its_weights(micro, tmp_path, monkeypatch):
    model = build(find_model(micro), 7)
    model.save_pretrained(tmp_path / "model")
    found = build(find_model(str(tmp_path / "model")), 0, dtype=torch.bfloat16)
    assert torch.equal(found.lm_head.weight, model.lm_head.weight.bfloat16())
    monkeypatch.setenv("KVPASS_MODELS", str(tmp_path))
    with pytest.raises(ValueError, match="'kvpass fetch smollm2-135m' brings it there"):
        find_model("smollm2-135m")
    with pytest.raises(ValueError, match="empty"):
        (tmp_path / "empty").mkdir()
        find_model(str(tmp_path / "empty"))


def test_the_share_of_scoring_counts_the_operators_of_kvpass_but_not_attention(micro):
    model = build(find_model(micro), 0)
    ids = torch.randint(64, (1, 200))
    compressed = Kvpass(model, "lava", policy=resolve("lava", window=8), budget=16, backend="eager")
    with torch.no_grad():
        compressed.prefill(ids)
        found = profile_prefill(lambda: compressed.prefill(ids), torch.device("cpu"))
        assert found.scoring is not None and 0 < found.scoring < 1
        assert found.attend_s > 0 == found.select_s and found.blocks == found.covered == 1
        eager = profile_prefill(lambda: HfEager(model).prefill(ids), torch.device("cpu"))
        assert eager.scoring is None and eager.attend_s == 0


def test_the_share_of_scoring_adds_up_what_is_not_attention():
    def event(name, own, children=(), kernels=()):
        return SimpleNamespace(name=name, self_cpu_time_total=own, cpu_children=list(children), kernels=list(kernels))

    def kernel(name, duration):
        return SimpleNamespace(name=name, duration=duration)

    waiting = event("Command Buffer Full", 40.0, kernels=[kernel("gemm of another operator", 900.0)])
    site = event(
        "kvpass::score_layer",
        5.0,
        [
            event("aten::scaled_dot_product_attention", 1000.0, [event("aten::mm", 9.0)]),
            event("aten::_flash_attention_forward", 100.0, kernels=[kernel("flash", 77.0)]),
            event("aten::_scaled_dot_product_cudnn_attention", 100.0, kernels=[kernel("cudnn_sdpa", 55.0)]),
            event("aten::topk", 30.0, [waiting], kernels=[kernel("sort", 2.0), kernel("scan", 3.0)]),
        ],
        [kernel("_window_kernel", 10.0), kernel("_prefill_kernel", 500.0)],
    )
    on_cpu, on_cuda = (list(bench_measure._beyond_attention(site, is_cuda=cuda)) for cuda in (False, True))
    assert on_cpu == [5.0, 30.0] and on_cuda == [10.0, 2.0, 3.0]
    replay = event("kvpass::replay", 2.0, [site])
    for cuda, total in ((False, 1246.0), (True, 647.0)):
        assert sum(bench_measure._beyond_attention(replay, is_cuda=cuda)) == total


def test_without_a_cuda_device_cuda_is_refused():
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(ValueError, match="device='cuda': this machine has no CUDA device"):
        BenchSettings(BenchOptions(model="tiny", device="cuda"))
