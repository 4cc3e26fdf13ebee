"""Configurations of vLLM that would not be exact."""

from types import SimpleNamespace

import pytest

from kvpass.vllm.refusals import REFUSALS, check_caches, check_config, check_heads, check_layer, check_version
from kvpass.vllm.settings import Settings


def settings(policy="lava", budget=64, **more):
    return Settings.read({"kvpass": {"policy": policy, "budget": budget, "room": 8, **more}})


LAVA, SNAPKV = settings(), settings("snapkv")
DOCUMENTS, CODES = settings(documents=["a=a.kv"]), settings(entries="rot4")


class Own(type(SNAPKV.policy)):
    name = "own"


class OwnDivisible(Own):
    divisible = True


OWN, OWN_DIVISIBLE = (Settings(kind(), 64, 8) for kind in (Own, OwnDivisible))
IN_CHUNKS = {"scheduler_config.enable_chunked_prefill": True, "scheduler_config.max_num_scheduled_tokens": None}
IN_GRAPHS = {"compilation_config.cudagraph_mode": SimpleNamespace(name="FULL_DECODE_ONLY")}
SHORT_CHUNKS = "chunks shorter than what a policy reads"
FAULTS = {
    "the second model runner": {"use_v2_model_runner": True},
    SHORT_CHUNKS: IN_CHUNKS | {"scheduler_config.max_num_batched_tokens": 64 + 31},
    "chunked prefill in CUDA graphs of whole decode steps": IN_CHUNKS | IN_GRAPHS,
    "prefix caching": {"cache_config.enable_prefix_caching": True},
    "splitting long prompts": {"scheduler_config.long_prefill_token_threshold": 512},
    "steps shorter than a prompt": {"scheduler_config.max_num_scheduled_tokens": 1999},
    "a scheduler of your own": {"scheduler_config.scheduler_cls": "mine.Scheduler"},
    "steps in parts": {"parallel_config.use_ubatching": True},
    "attention that is not causal": {"attention_config.use_non_causal": True},
    "scheduling by priority": {"scheduler_config.policy": "priority"},
    "pipeline parallelism": {"parallel_config.pipeline_parallel_size": 2},
    "context parallelism": {"parallel_config.decode_context_parallel_size": 2},
    "more processes than divide the KV heads": {"parallel_config.tensor_parallel_size": 3},
    "speculative decoding": {"speculative_config": object()},
    "KV transfer": {"kv_transfer_config": object()},
    "LoRA": {"lora_config": object()},
    "prompt embeddings": {"model_config.enable_prompt_embeds": True},
    "pooling models": {"model_config.runner_type": "pooling"},
    "multimodal models": {"model_config.is_multimodal_model": True},
    "latent attention": {"model_config.use_mla": True},
    "attention backends chosen by kind of layer": {"attention_config.backend_per_kind": {"full_attention": object()}},
    "a quantised cache": {"cache_config.cache_dtype": "fp8"},
}
"""What is refused with every policy."""
IN_ENVIRONMENT = {
    "a VLLM_PLUGINS that does not name kvpass": ("VLLM_PLUGINS", "other,kvpass2"),
    "the front end in Rust": ("VLLM_USE_RUST_FRONTEND", "1"),
}
"""What is refused by a variable of the environment."""
WITH_SETTINGS = {
    "policies that read the output projection of a layer": ({}, settings("criticalkv")),
    "policies that read the rotary embedding": ({}, settings("expected_attention")),
    "policies that replay the prompt": ({}, settings("kvzip")),
    "policies that score tokens by what enters attention": ({}, settings("kvzap", 129, weights="FILE")),
    "chunked prefill with a policy that reads how all tokens attend": (
        IN_CHUNKS,
        settings("vatp", indicator="h2o", evict_during_decode=False),
    ),
    "tensor parallelism with a policy of your own": ({"parallel_config.tensor_parallel_size": 2}, OWN),
    "documents of a model that --hf-overrides changes": ({"model_config.hf_overrides": {"rope_theta": 1.0}}, DOCUMENTS),
    "documents in CUDA graphs of whole decode steps": (IN_GRAPHS, DOCUMENTS),
    "entries in fewer bits in CUDA graphs of whole decode steps": (IN_GRAPHS, CODES),
}
"""What is refused with these settings."""
LAYER = {"alibi": False, "sliding_window": None, "kind": "decoder", "shares_cache": False}
OURS = {"kinds": {"Ours"}, "ours": "Ours"}
HEADS = {"keys": 64, "values": 64, "supported": [32, 64]}


SUPPORTED = {
    "scheduler_config.enable_chunked_prefill": False,
    "scheduler_config.max_num_seqs": 64,
    "scheduler_config.max_num_batched_tokens": 2064,
    "scheduler_config.long_prefill_token_threshold": 0,
    "scheduler_config.max_num_scheduled_tokens": 2000,
    "scheduler_config.scheduler_cls": None,
    "scheduler_config.policy": "fcfs",
    "cache_config.enable_prefix_caching": False,
    "cache_config.cache_dtype": "auto",
    **{f"parallel_config.{name}_parallel_size": 1 for name in ("tensor", "pipeline")},
    **{f"parallel_config.{name}_context_parallel_size": 1 for name in ("decode", "prefill")},
    "parallel_config.use_ubatching": False,
    "attention_config.use_non_causal": False,
    "attention_config.backend_per_kind": {},
    "model_config.enable_prompt_embeds": False,
    "model_config.hf_overrides": {},
    "model_config.runner_type": "generate",
    "model_config.is_multimodal_model": False,
    "model_config.use_mla": False,
    "model_config.hf_text_config.kv_lora_rank": None,
    "model_config.max_model_len": 2000,
    "model_config.get_total_num_kv_heads": lambda: 4,
    "compilation_config.cudagraph_mode": None,
    "use_v2_model_runner": False,
    **dict.fromkeys(("speculative_config", "kv_transfer_config", "diffusion_config", "lora_config")),
}
"""A configuration of vLLM that is supported."""


def config(**changes: object) -> SimpleNamespace:
    """The supported configuration with some changes."""
    assert changes.keys() <= SUPPORTED.keys()
    found = SimpleNamespace()
    for path, value in (SUPPORTED | changes).items():
        *parents, name = path.split(".")
        target = found
        for parent in parents:
            target = vars(target).setdefault(parent, SimpleNamespace())
        setattr(target, name, value)
    return found


def test_what_is_supported_is_not_refused(monkeypatch):
    """Also prompts in chunks that hold what a policy reads, and what documents and codes cannot have without them."""
    monkeypatch.setenv("VLLM_PLUGINS", "other,kvpass")
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "0")
    step = "scheduler_config.max_num_scheduled_tokens"
    for settings in (LAVA, DOCUMENTS, CODES, SNAPKV):
        for changes in (
            {},
            *(IN_CHUNKS | {name: 64 + 32} for name in ("scheduler_config.max_num_batched_tokens", step)),
        ):
            check_config(config(**changes), settings)
        with pytest.raises(ValueError, match=SHORT_CHUNKS):
            check_config(config(**IN_CHUNKS | {step: 64 + 31}), settings)
    for changes in (IN_GRAPHS, {"model_config.hf_overrides": {"rope_theta": 1.0}}):
        check_config(config(**changes), LAVA)
    for settings in (LAVA, SNAPKV, OWN_DIVISIBLE):
        check_config(config(**{"parallel_config.tensor_parallel_size": 2}), settings)
    check_version("0.32.0")
    check_heads(24, 24, [])


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.name)
def test_each_row_of_the_table_refuses_its_fault_alone_and_says_what_to_do(refusal, monkeypatch):
    if refusal.name in IN_ENVIRONMENT:
        monkeypatch.setenv(*IN_ENVIRONMENT[refusal.name])
        changes, settings = {}, LAVA
    else:
        changes, settings = WITH_SETTINGS.get(refusal.name) or (FAULTS[refusal.name], LAVA)
    with pytest.raises(ValueError) as raised:
        check_config(config(**changes), settings)
    assert str(raised.value) == f"kvpass does not support {refusal.name} ({refusal.advice})"


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        (FAULTS["prefix caching"] | FAULTS["LoRA"], "prefix caching .*; LoRA"),
        ({"parallel_config.prefill_context_parallel_size": 2}, "context parallelism"),
        ({"diffusion_config": object()}, "not causal"),
        ({"model_config.hf_text_config.kv_lora_rank": 512}, "latent attention"),
    ],
)
def test_all_faults_are_told_at_once_and_the_other_cause_of_one_is_refused_too(fault, name):
    with pytest.raises(ValueError, match=name):
        check_config(config(**fault), LAVA)


@pytest.mark.parametrize(
    ("check", "supported", "other", "message"),
    [
        (check_layer, LAYER, {"alibi": True}, "ALiBi .*bias.*leave 'kvpass' out"),
        (check_layer, LAYER, {"sliding_window": 512}, "sliding windows .*one block.*leave 'kvpass' out"),
        (check_layer, LAYER, {"kind": "encoder"}, "attention of kind 'encoder' .*causal.*leave 'kvpass' out"),
        (check_layer, LAYER, {"shares_cache": True}, "share their cache .*of its own.*leave 'kvpass' out"),
        (check_caches, OURS, {"kinds": {"Window", "Ours", "Latents"}}, "others: Latents, Window"),
        (check_caches, OURS, {"kinds": set()}, "others: none"),
        (check_heads, HEADS, {"values": 32}, "keys of 64 and values of 32 numbers"),
        (check_heads, HEADS, {"keys": 24, "values": 24}, "keys of 24 and values of 24 numbers"),
        *(
            (check_version, {"found": "0.33.0+cpu"}, {"found": version}, rf"vLLM 0\.32 and 0\.33, not {version}")
            for version in ("0.31.1", "0.34.0", "1.0")
        ),
    ],
)
def test_what_no_block_holds_and_other_versions_are_refused(check, supported, other, message):
    check(**supported)
    with pytest.raises(ValueError, match=message):
        check(**supported | other)
