"""Random lives of caches, step by step against the uncompressed model that keeps everything and masks.

Of a cache only the positions it says it holds are believed; that a policy chooses them well is tested elsewhere. Every
step compares logits, so that an entry, a position or a row that was mixed up shows at the next token.
"""

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import kvpass
from masked_oracle import MaskedOracle, Transcript, kept_columns
from numeric_checks import assert_close
from pairwise import quick
from tiny_models import compiled_once, left_pad, random_ids

STEPS = 14
BUDGET, WINDOW = 14, 5
MOST_CACHES, MOST_COLUMNS = 4, 110
PROMPTS = [1, 2, 3, 6, 14, 17, 30]
"""Prompt lengths: within the window, within the budget, above it."""


def machine(family, policy, recompress="never", layers=2, sizes=(1, 3)):
    """The state machine for one model, which is shared with other tests, and batches of these sizes.

    One row and several are captured apart, in a model with a window for many seconds.
    """
    options = {"backend": "eager", "recompress": recompress, "policy": policy, "budget": BUDGET, "window": WINDOW}
    options |= {"evict_during_decode": False} if policy == "streaming_llm" else {}

    class Lives(RuleBasedStateMachine):
        steps = 0
        oracle = None

        @initialize()
        def begin(self):
            self.model, self.fast = compiled_once(family, layers=layers, **options)
            type(self).oracle = self.oracle or MaskedOracle(self.model)
            self.caches: list[tuple[kvpass.CompressedCache, Transcript]] = []
            self.folder = tempfile.TemporaryDirectory()

        def teardown(self):
            self.folder.cleanup()

        def pick(self, data):
            type(self).steps += 1
            return self.caches[data.draw(st.integers(0, len(self.caches) - 1), label="cache")]

        def keep(self, cache, transcript):
            self.caches = [*self.caches, (cache, transcript)][-MOST_CACHES:]

        def feed(self, cache, transcript, ids):
            """Tokens through a cache; its continuation, with the logits checked."""
            transcript.append(ids, kept_columns(cache, cache.columns))
            out = self.fast(ids, past_key_values=cache)
            tokens = ids.shape[1]
            if any(store.evicts for store in cache.state.full_layers) and tokens > 1:
                raise AssertionError("what several tokens see of an evicting cache is not known from outside")
            assert_close("logits", out.logits, transcript.logits()[:, -tokens:], atol=2e-4)
            return out.past_key_values

        @rule(data=st.data(), rows=st.sampled_from(sizes))
        def prefill(self, data, rows):
            type(self).steps += 1
            lengths = data.draw(st.lists(st.sampled_from(PROMPTS), min_size=rows, max_size=rows), label="lengths")
            seed = data.draw(st.integers(0, 99), label="seed")
            ids, mask = left_pad([random_ids(1, n, seed=seed + n)[0] for n in lengths])
            reusable = data.draw(st.booleans(), label="reusable")
            config = self.model.config
            transcript = Transcript(self.oracle, ids, mask, config.num_hidden_layers, config.num_key_value_heads)
            if reusable:
                cache = self.fast.compress(ids, mask)
            else:
                out = self.fast(ids, attention_mask=mask)
                cache = out.past_key_values
                real = mask.bool()
                assert_close("prompt", out.logits[real], transcript.logits()[real], atol=2e-4)
            self.keep(cache, transcript)

        @precondition(lambda self: self.caches)
        @rule(data=st.data(), tokens=st.sampled_from([1, 1, 1, 2, 5, 9]))
        def append(self, data, tokens):
            """Decode, or extend; a reusable cache must stay what it was."""
            cache, transcript = self.pick(data)
            if cache.columns + tokens > MOST_COLUMNS:
                return
            ids = random_ids(cache.batch_size, tokens, seed=data.draw(st.integers(0, 99), label="seed"))
            evicts = any(store.evicts for store in cache.state.full_layers)
            pieces = ids.split(1, 1) if evicts else [ids]
            at_once = cache.clone()
            logits = self.fast(ids, past_key_values=at_once).logits if evicts else None
            grown, before = cache, cache.columns
            transcript = transcript.clone() if cache.reusable else transcript
            for piece in pieces:
                grown = self.feed(grown, transcript, piece.contiguous())
            if evicts:
                assert_close("several at once", logits, transcript.logits()[:, -tokens:], atol=2e-4)
                assert torch.equal(at_once.positions, grown.positions)
            assert (grown is cache) == (not cache.reusable)
            if cache.reusable:
                assert cache.columns == before
                self.keep(grown, transcript)

        @precondition(lambda self: self.caches)
        @rule(data=st.data())
        def clone(self, data):
            """A clone and its original live on with tokens of their own."""
            cache, transcript = self.pick(data)
            twin = cache.clone(), transcript.clone()
            if cache.columns + 2 <= MOST_COLUMNS and not cache.reusable:
                for seed, pair in enumerate((twin, (cache, transcript), twin, (cache, transcript))):
                    self.feed(*pair, random_ids(cache.batch_size, 1, seed=seed))
            self.keep(*twin)

        @precondition(lambda self: self.caches)
        @rule(data=st.data(), how=st.sampled_from(["reorder", "select", "repeat"]))
        def change_rows(self, data, how):
            cache, transcript = self.pick(data)
            rows = cache.batch_size
            if how == "repeat":
                if rows > 1:
                    return
                index = torch.zeros(sizes[-1], dtype=torch.int64)
                cache.batch_repeat_interleave(sizes[-1])
            else:
                count = rows if how == "reorder" else data.draw(st.sampled_from(sizes), label="count")
                chosen = st.lists(st.integers(0, rows - 1), min_size=count, max_size=count)
                index = torch.tensor(data.draw(chosen, label="rows"))
                (cache.reorder_cache if how == "reorder" else cache.batch_select_indices)(index)
            transcript.pick_rows(index)
            if cache.columns < MOST_COLUMNS and not cache.reusable:
                self.feed(cache, transcript, random_ids(cache.batch_size, 1))

        @precondition(lambda self: self.caches)
        @rule(data=st.data())
        def save_and_load(self, data):
            cache, transcript = self.pick(data)
            path = Path(self.folder.name, "cache.kv")
            cache.save(path)
            loaded = kvpass.load_cache(path, self.fast)
            assert loaded.reusable == cache.reusable and torch.equal(loaded.state.start, cache.state.start)
            copied = transcript.clone()
            if loaded.columns < MOST_COLUMNS and not loaded.reusable:
                self.feed(loaded, copied, random_ids(loaded.batch_size, 1))
            self.keep(loaded, copied)

        @precondition(lambda self: self.caches)
        @rule(data=st.data())
        def reset(self, data):
            cache, _ = self.pick(data)
            cache.reset()
            self.caches = [pair for pair in self.caches if pair[0] is not cache]

        @invariant()
        def sizes_are_what_they_say(self):
            for cache, transcript in getattr(self, "caches", []):
                assert (cache.batch_size, cache.columns) == transcript.ids.shape
                for store in cache.state.full_layers:
                    if store.evicts or recompress == "every_turn":
                        continue
                    appended = transcript.ids.shape[1] - cache.state.start
                    assert bool((store.lengths <= appended[:, None, None]).all())

    return Lives


MACHINES = {
    "lava": machine("llama", "lava"),
    "lava, every turn": machine("llama", "lava", "every_turn"),
    "one layer, when full": machine("llama", "streaming_llm", "when_full", layers=1),
    "ring": machine("gemma3", "ada_snapkv", "when_full", sizes=(2, 3)),
    "evicts": machine("llama", "h2o"),
}


@pytest.mark.parametrize("examples", [6, pytest.param(30, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", quick([*MACHINES], MACHINES.keys() - {"one layer, when full"}))
def test_random_cache_operations_give_the_logits_of_the_masked_model(name, examples):
    case = MACHINES[name].TestCase
    case.settings = settings(
        max_examples=examples,
        stateful_step_count=STEPS,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    before = MACHINES[name].steps
    case().runTest()
    steps = MACHINES[name].steps - before
    assert steps >= 10 * examples, f"only {steps} steps"
