"""Compiled means compiled: one graph per phase, no breaks, bounded memory, and dumps that show what happened."""

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor.codegen.simd import SIMDScheduling
from torch._inductor.graph import GraphLowering
from torch._inductor.utils import sympy_product
from torch._logging._internal import LazyTraceHandler, TorchLogsFormatter, trace_log

import kvpass
from compiled_models import UNLIMITED, compiled_anew, greedy, in_pieces, spoken
from masked_oracle import assert_decodes_like_the_masked_model, assert_padded_rows_equal_alone
from numeric_checks import assert_close
from tiny_models import random_ids, tiny_model


def test_contract_8_one_graph_per_phase_over_8_prompt_lengths_every_kind_of_budget_and_200_steps():
    counters.clear()
    fast = kvpass.compile(tiny_model("llama", layers=1), budget=20, window=8)
    for budget in (20, 0.5, "64KiB"):
        fast.set_budget(budget)
        for tokens in (33, 47, 64, 65, 100, 128, 300, 1000) if budget == 20 else (65, 1000):
            out = fast(random_ids(1, tokens), logits_to_keep=1)
            token = out.logits[:, -1:].argmax(-1)
            for _ in range(5):
                out = fast(token, past_key_values=out.past_key_values)
                token = out.logits[:, -1:].argmax(-1)
        for tokens in (2, 9, 30):
            out = fast(random_ids(1, tokens), past_key_values=out.past_key_values, logits_to_keep=1)
    out, capacities = fast(random_ids(1, 50), logits_to_keep=1), set()
    for _ in range(200):
        out = fast(token, past_key_values=out.past_key_values)
        capacities.add(out.past_key_values.state.full_layers[0].buffers.tail_k.shape[3])
    assert len(capacities) == 4 and max(capacities) >= 208, "tails of other lengths use the same graph"
    phases = [record.phase for record in fast.report().compiled]
    assert sorted(phases) == ["decode", "extend", "prefill"]
    assert counters["stats"]["unique_graphs"] == 1, "of several tokens, from which all phases are made"
    assert not counters["graph_break"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("regions", [False, True])
def test_contract_8_indices_of_32_bits_as_on_a_gpu_bound_no_prompt(monkeypatch, regions):
    """Triton code asks whether indices of 32 bits do, which would be a guard on the length; C++ code does not ask."""
    codegen, asked, guards = GraphLowering.codegen, [], []

    def guarded(graph):
        shapes = graph.sizevars.shape_env
        known = len(shapes.guards)
        for buffer in graph.buffers:
            if buffer.has_tensor_output():
                size = sympy_product(buffer.get_size())
                fits = SIMDScheduling.can_use_32bit_indexing(size, [buffer])
                asked.append((bool(size.free_symbols), fits))
        guards.extend(shapes.guards[known:])
        return codegen(graph)

    monkeypatch.setattr(GraphLowering, "codegen", guarded)
    fast = kvpass.compile(tiny_model("llama", num_hidden_layers=1), budget=20, window=8, compile_regions=regions)
    with inductor_config.patch(fx_graph_cache=False):
        for tokens in (61, 9, 2):
            out = fast(random_ids(1, tokens))
        for tokens in (3, 1):
            out = fast(random_ids(1, tokens), past_key_values=out.past_key_values)
        assert [record.phase for record in fast.report().compiled] == ["prefill", "extend", "decode"]
    assert asked.count((True, False)) > 20, "64 bits for what grows with the text"
    assert set(asked) == {(True, False), (False, True)}, "and 32 bits for all else"
    assert not guards


def test_contract_7_passes_are_reported_dumped_and_traced(tmp_path, monkeypatch):
    """With op counts; in the trace log as artifacts named kvpass.*, which tlparse reads."""
    monkeypatch.setenv("KVPASS_DUMP", str(tmp_path))
    traced = tmp_path / "trace"
    handler = LazyTraceHandler(str(traced))
    handler.setFormatter(TorchLogsFormatter(trace=True))
    trace_log.addHandler(handler)
    try:
        fast = compiled_anew()
        with pytest.raises(ValueError, match="no prompt"):
            fast.report()
        cache = fast(random_ids(1, 50)).past_key_values
        nbytes = cache.nbytes
        fast(random_ids(1, 1), past_key_values=cache)
    finally:
        trace_log.removeHandler(handler)
        handler.close()
    text = "".join(path.read_text() for path in traced.iterdir())
    for name in ("00.offset_positions.after", "00.offset_positions.ops", "part_0"):
        assert f'"kvpass.prefill.00.{name}"' in text
    names = {path.name for path in tmp_path.iterdir()}
    parts = [f"prefill.00.part_{part}.txt" for part in range(3)]  # before, around and after the attention of one layer
    assert {*parts, "prefill.00.00.offset_positions.before.txt", "decode.01.02.rewrite_cached.after.txt"} <= names
    assert "kvpass.site" in (tmp_path / "prefill.00.00.offset_positions.before.txt").read_text()
    assert "torch.nn.functional.embedding" in (tmp_path / parts[0]).read_text()
    after = (tmp_path / "decode.01.02.rewrite_cached.after.txt").read_text()
    assert "torch.ops.kvpass.attend_cache.default(" in after and "kvpass_store0_pool_k" in after
    ops = (tmp_path / "decode.01.02.rewrite_cached.ops.txt").read_text()
    assert "kvpass.attend_cache.default: 0 -> 1 (+1)" in ops and "kvpass.site.default: 1 -> 0 (-1)" in ops
    report = fast.report().to_dict()
    assert [(record["phase"], record["sites"]) for record in report["compiled"]] == [("prefill", 1), ("decode", 1)]
    assert report["nbytes"] == nbytes
    prefill, decode = ({done["name"]: done for done in record["passes"]} for record in report["compiled"])
    assert prefill["split_layers"]["sites"] == 1
    assert "kvpass.attend_cache.default: 0 -> 1 (+1)" in decode["rewrite_cached"]["op_diff"]


@pytest.fixture(scope="module")
def several_rows():
    """A model and its copy in compiled code, of which two rows or more and all logits are captured."""
    model = tiny_model("llama", layers=1)
    return model, kvpass.compile(model, budget=UNLIMITED, window=8)


def test_contracts_1_and_8_two_rows_or_more_share_their_graphs_and_a_long_prompt_is_compiled_in_parts(several_rows):
    (model, fast), counts = several_rows, []
    fast.set_policy("lava", UNLIMITED, window=8)
    for rows in (2, 3, 7):
        text = random_ids(rows, 47)
        assert_close("logits", in_pieces(fast, text, [41, 1, 1, 4])[0], model(text).logits, atol=1e-4)
        assert torch.equal(spoken(fast, text[:, :41], 12), greedy(model, text[:, :41], 12))
        counts.append(sorted((record.phase, record.parts) for record in fast.report().compiled))
    assert counts == [[("decode", 1), ("extend", 2), ("prefill", 3)]] * 3
    assert "compiled decode of 2 or more rows (inductor)" in str(fast.report())


def test_contracts_4_and_6_padded_rows_are_as_alone_and_decoding_equals_masking(several_rows):
    model, fast = several_rows
    fast.set_policy("lava", 14, window=8)
    assert_decodes_like_the_masked_model(model, fast, [61, 37], [*[1] * 9, 50, *[1] * 9, 10])
    assert_padded_rows_equal_alone(fast, "lava", copies=2)


def test_a_cache_that_evicts_keeps_its_size_but_for_the_ids_for_any_output_length(several_rows):
    _, fast = several_rows
    fast.set_policy("h2o", 16, window=6)
    cache, token = fast(random_ids(2, 50)).past_key_values, random_ids(2, 1)
    sizes, entries, compiled = set(), set(), set()
    for _ in range(80):
        token = fast(token, past_key_values=cache).logits.argmax(-1)
        sizes.add(cache.nbytes - cache.ids.nbytes)
        entries.add(int(cache.lengths.sum()))
        compiled.add(len(fast.report().compiled))
    assert len(sizes) == len(compiled) == 1 and entries == {16 * 2 * 2}
    assert cache.get_seq_length() == 130


def test_steps_that_only_append_are_rewritten_once_for_all_policies_and_a_later_model_has_nothing_captured_again():
    model, rewritten = tiny_model("llama", layers=1), []
    fast = kvpass.compile(model, budget=16, window=8, backend="eager")
    for policy in ("lava", "snapkv", "h2o"):
        fast.set_policy(policy, 16, window=8)
        fast(random_ids(1, 1), past_key_values=fast(random_ids(1, 60)).past_key_values)
        (record,) = (record for record in fast.report().compiled if record.phase == "decode")
        rewritten.append(record.passes[-1])
    assert rewritten[0] is rewritten[1] is not rewritten[2]
    type("Another", (type(model),), {})(model.config)
    counters.clear()
    fast(random_ids(1, 50))
    assert not counters["stats"]["unique_graphs"]
