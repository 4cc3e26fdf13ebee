"""Continuous batching of transformers: tokens of ``generate`` for each prompt alone, in one block a request."""

from __future__ import annotations

import time

import pytest
import torch
from transformers import GenerationConfig

import kvpass
from kvpass.cache.requests import RequestCache
from kvpass.transformers_compat import CACHE
from tiny_models import VOCABULARY, compiled_once, random_ids, sharing_captures, tiny_model

pytest.importorskip("transformers.generation.continuous_batching.cache_allocators", reason="transformers below 5.18")

from transformers import ContinuousBatchingConfig

pytestmark = pytest.mark.usefixtures("captures_kept")
NEW = 9
PROMPTS = [random_ids(1, n, seed=n)[0].tolist() for n in (30, 5, 80, 130, 1, 2)]
SMALL = {"layers": 2, "policy": "lava", "budget": 24, "window": 8, "backend": "eager"}
GREEDY = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1)


@pytest.fixture
def tight():
    return compiled_once(**SMALL)[1]


def compiled_anew(family="llama", **options):
    """A model of its own, with the captures of ``compiled_once``."""
    options = {"policy": "lava", "budget": 24, "window": 8, "backend": "eager", **options}
    fast = kvpass.compile(tiny_model(family, layers=2), **options)
    return sharing_captures(fast, family, 2, options["backend"])


@pytest.fixture
def together(monkeypatch):
    """Numbers of requests that got a token together, call by call."""
    found = []
    choose = RequestCache.choose

    def noted(self, rows, last):
        found.append(len(rows))
        choose(self, rows, last)

    monkeypatch.setattr(RequestCache, "choose", noted)
    return found


def alone(fast, prompt, new=NEW):
    ids = torch.tensor([prompt])
    return fast.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)[
        0, ids.shape[1] :
    ].tolist()


def answers(fast, prompts=PROMPTS, config=None, **options):
    found = fast.generate_batch(
        prompts, generation_config=GREEDY, continuous_batching_config=config, max_new_tokens=NEW, **options
    )
    assert [one.error for one in found.values()] == [None] * len(found)
    return [one.generated_tokens for one in found.values()]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"policy": "snapkv", "budget": "16KiB"},
        {"policy": "kvzip", "window": None},
        {"policy": "ada_snapkv", "entries": "int8"},
        {"entries": "rot4"},
        {"family": "gpt2"},
        pytest.param({"backend": "inductor"}, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_tokens_are_those_of_each_prompt_alone_also_in_blocks_used_before(options, together):
    fast = compiled_anew(**options)
    config = ContinuousBatchingConfig(num_blocks=1, page_size=30 if "entries" in options else 90)
    assert answers(fast, config=config) == [alone(fast, prompt) for prompt in PROMPTS]
    assert 1 < max(together) < len(PROMPTS)


def test_no_more_requests_run_together_than_there_are_blocks(tight, together):
    config = ContinuousBatchingConfig(num_blocks=2, page_size=64)
    prompt = tight(torch.tensor([PROMPTS[0]]))[CACHE]
    expected = 128 * prompt.layout.token_bytes("model") // RequestCache.row_bytes(prompt, 24, NEW)
    assert answers(tight, config=config) == [alone(tight, one) for one in PROMPTS]
    assert max(together) == expected == 3


def test_room_that_is_given_is_the_memory_that_is_held(tight):
    prompt = tight(torch.tensor([PROMPTS[0]]))[CACHE]
    requests = RequestCache(prompt, 24, NEW, 5)
    counters = 5 * requests.full_layers[0].tail_used.itemsize
    held = requests.full_layers[0].buffers
    held = {name: x for name, x in held.items() if name not in ("pool_positions", "row_index")}
    assert sum(x.nbytes for x in held.values()) == 5 * RequestCache.row_bytes(prompt, 24, NEW) + counters


def test_prompt_that_comes_in_chunks_is_compressed_as_a_whole(tight):
    assert answers(tight, config=ContinuousBatchingConfig(max_batch_tokens=32)) == [
        alone(tight, prompt) for prompt in PROMPTS
    ]


def test_several_answers_to_a_prompt(tight):
    config = GenerationConfig(max_new_tokens=NEW, do_sample=True, top_k=1, eos_token_id=-1, num_return_sequences=3)
    found = tight.generate_batch(PROMPTS[:3], generation_config=config)
    expected = [alone(tight, prompt) for prompt in PROMPTS[:3] for _ in range(3)]
    assert [one.generated_tokens for one in found.values()] == expected


def test_requests_join_are_cancelled_and_leave_no_block_behind(tight):
    manager = tight.init_continuous_batching(generation_config=GREEDY)
    manager.start()
    try:
        manager.add_request(PROMPTS[0], "first", streaming=True)
        while not manager.get_result("first", timeout=60).generated_tokens:
            pass
        manager.add_request(PROMPTS[3], "cancelled", max_new_tokens=NEW)
        manager.cancel_request("cancelled")
        manager.add_request(PROMPTS[2], "last", max_new_tokens=4)
        done = {}
        while len(done) < 2:
            result = manager.get_result(timeout=60)
            if result.is_finished() and result.request_id != "cancelled":
                done[result.request_id] = result.generated_tokens
        assert done == {"first": alone(tight, PROMPTS[0]), "last": alone(tight, PROMPTS[2], 4)}
        cache = manager.batch_processor.cache
        deadline = time.monotonic() + 60
        while cache.states and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not cache.states and not cache.allocator.block_table and cache.compute_free_capacity() == 1
    finally:
        manager.stop()


def test_request_that_begins_again_keeps_what_its_prompt_kept(tight):
    """transformers does this where memory is short, which blocks for life do not bring about."""
    manager = tight.init_continuous_batching(generation_config=GREEDY)
    for name in ("again", "other"):
        manager.add_request(PROMPTS[2], name)
    processor = manager.batch_processor = manager._create_batch_processor()
    step = 0
    while processor.prepare_next_batch():
        manager._generation_step()
        processor.update_batch()
        step += 1
        if step == 4:
            state = processor.scheduler.active_requests["again"]
            processor.scheduler.finish_request("again")
            processor.scheduler.add_waiting_request(state.create_equivalent_initial_request())
    found = [manager.output_router.output_queue.get_nowait() for _ in range(2)]
    assert [one.generated_tokens for one in found] == [alone(tight, PROMPTS[2])] * 2


def test_manager_that_is_kept_serves_until_the_budget_changes(tight):
    model = compiled_anew()
    attention = model.config._attn_implementation
    first = answers(model, persistent_manager=True)
    kept = model._cached_continuous_batching_manager
    assert answers(model, persistent_manager=True) == first == answers(tight)
    assert model._cached_continuous_batching_manager is kept
    model.set_budget(16)
    expected = [alone(model, prompt) for prompt in PROMPTS]
    assert answers(model, persistent_manager=True) == expected != first
    assert model._cached_continuous_batching_manager is not kept
    assert model.config._attn_implementation == attention
    model.destroy_cached_continuous_batching_manager()


def test_manager_that_is_kept_serves_no_other_configuration(tight):
    model, once = compiled_anew(), {"persistent_manager": True}
    plain = answers(model, PROMPTS[:1], **once)[0]
    kept = model._cached_continuous_batching_manager
    ends = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=plain[3])
    found = model.generate_batch(PROMPTS[:1], generation_config=ends, **once)
    assert [one.generated_tokens for one in found.values()] == [plain[: plain.index(plain[3]) + 1]]
    assert model._cached_continuous_batching_manager is not kept
    kept = model._cached_continuous_batching_manager
    config = ContinuousBatchingConfig(num_blocks=8, page_size=90)
    model.generate_batch(PROMPTS[:1], generation_config=ends, continuous_batching_config=config, **once)
    assert model._cached_continuous_batching_manager is not kept
    free = GenerationConfig(do_sample=False)
    model.generate_batch(PROMPTS[:1], generation_config=free, max_new_tokens=3, **once)
    with pytest.raises(ValueError, match="needs max_new_tokens"):
        model.generate_batch(PROMPTS[:1], generation_config=free, **once)
    model.destroy_cached_continuous_batching_manager()


def test_what_a_configuration_leaves_open_is_that_of_the_model_as_in_generate(tight, monkeypatch):
    ids = torch.tensor(PROMPTS[:1])
    given = GenerationConfig(max_new_tokens=NEW)
    end = int(tight.generate(ids, given)[0, -5])
    monkeypatch.setattr(tight.generation_config, "eos_token_id", [end, 127])
    expected = tight.generate(ids, given, attention_mask=torch.ones_like(ids))[0, ids.shape[1] :].tolist()
    assert len(expected) < NEW
    found = tight.generate_batch(PROMPTS[:1], generation_config=given)
    assert [one.generated_tokens for one in found.values()] == [expected]
    monkeypatch.setattr(tight.generation_config, "eos_token_id", None)
    monkeypatch.setattr(tight.config, "eos_token_id", end)
    found = tight.generate_batch(PROMPTS[:1], generation_config=given)
    assert [len(one.generated_tokens) for one in found.values()] == [NEW]


@pytest.mark.parametrize(
    ("settings", "arguments", "message"),
    [
        ({"num_beams": 2}, {}, "continuous batching with num_beams=2 is not supported"),
        ({"stop_strings": ["x"]}, {}, r"continuous batching with stop_strings=\['x'\] is not supported"),
        ({}, {"budget": 16}, "argument 'budget' is not supported: .* model.set_budget"),
        ({}, {"do_sample": True}, "argument 'do_sample' is not supported: .* go into generation_config"),
        ({"num_return_sequences": 2, "do_sample": True}, {}, "num_return_sequences=2 for a prompt of 1 token"),
    ],
    ids=str,
)
def test_what_transformers_would_leave_out_is_refused(tight, settings, arguments, message):
    with pytest.raises(ValueError, match=message):
        tight.generate_batch([[5]], GenerationConfig(max_new_tokens=NEW, **settings), **arguments)


@pytest.mark.parametrize("prompts", [{"input_ids": [[1, 2]]}, torch.tensor([[1, 2]])], ids=["encoding", "tensor"])
def test_prompts_that_are_no_lists_are_named(tight, prompts):
    with pytest.raises(ValueError, match="continuous batching takes lists of token ids"):
        tight.generate_batch(prompts, generation_config=GREEDY)


REFUSED_SETTINGS = {
    "use_cuda_graph": True,
    "q_padding_interval_size": 64,
    "kv_padding_interval_size": 64,
    "varlen_compile_config": {"mode": "default"},
    "decode_compile_config": {"mode": "default"},
    "default_compile_level": 1,
    "use_async_batching": True,
    "cpu_offload_space": 1.0,
    "scheduler_type": "x",
}


@pytest.mark.parametrize("name", REFUSED_SETTINGS)
def test_setting_is_refused_by_its_name(tight, name):
    config = ContinuousBatchingConfig(**{name: REFUSED_SETTINGS[name]})
    with pytest.raises(ValueError, match=name):
        tight.generate_batch(PROMPTS, generation_config=GREEDY, continuous_batching_config=config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "h2o", "budget": 24}, "'h2o', which evicts while decoding"),
        ({"policy": "full", "budget": None}, "all blocks have one size"),
        ({"budget": 0.5}, r"budget=0\.5"),
        ({"recompress": "every_turn"}, "recompress='every_turn'"),
        ({"family": "mistral_sliding"}, "sliding window"),
        ({"family": "deepseek_v2"}, "latent attention"),
    ],
    ids=str,
)
def test_model_or_rule_is_refused(options, message):
    options = {**SMALL, **options}
    if options["policy"] == "full":
        del options["window"]
    fast = compiled_once(options.pop("family", "llama"), **options)[1]
    for start in (fast.init_continuous_batching, lambda **options: fast.generate_batch(PROMPTS, **options)):
        with pytest.raises(ValueError, match=f"continuous batching.*{message}"):
            start(generation_config=GREEDY)


@pytest.mark.parametrize("prompt", [[], [1, VOCABULARY], [-1]])
def test_prompt_is_refused(tight, prompt):
    with pytest.raises(ValueError, match=r"must have ids in 0\.\.127"):
        tight.generate_batch([[1, 2], prompt], generation_config=GREEDY)


def test_request_that_does_not_fit_is_refused(tight):
    with pytest.raises(ValueError, match="needs max_new_tokens"):
        tight.generate_batch(PROMPTS, generation_config=GenerationConfig(do_sample=False))
    with pytest.raises(ValueError, match="but one request holds"):
        answers(tight, config=ContinuousBatchingConfig(num_blocks=1, page_size=4))
    manager = tight.init_continuous_batching(generation_config=GREEDY)
    with pytest.raises(ValueError, match="room for 1 to 9 tokens"):
        manager.add_request(PROMPTS[0], max_new_tokens=NEW + 1)
    with pytest.raises(ValueError, match="must have ids"):
        manager.add_request([VOCABULARY])
    few = compiled_once("gpt2", **SMALL)[1]
    with pytest.raises(ValueError, match="does not take more than 2048"):
        few.generate_batch([[1] * 2040], generation_config=GREEDY)


def test_a_manager_that_is_kept_refuses_a_prompt_that_is_too_long():
    fast = compiled_anew("gpt2")
    answers(fast, PROMPTS[:2], persistent_manager=True)
    try:
        with pytest.raises(ValueError, match="does not take more than 2048"):
            fast.generate_batch([[1] * 2040], generation_config=GREEDY, max_new_tokens=NEW, persistent_manager=True)
    finally:
        fast.destroy_cached_continuous_batching_manager()
