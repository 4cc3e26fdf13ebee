"""Tiny random models of every family, compiled ones that tests share, and prompts for them."""

import functools
import tempfile
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.pgo
import transformers
from packaging.version import Version
from safetensors.torch import save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel

import kvpass
from kvpass.config import Compiler, EntryFormat
from kvpass.policies.conditions import Recompress

VOCABULARY = 128

_COMMON = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
_HIDDEN: dict[str, Any] = {**_COMMON, "hidden_size": 64}
_LAYERED: dict[str, Any] = {
    **_HIDDEN,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
}
LLAMA_LIKE: dict[str, Any] = {**_LAYERED, "intermediate_size": 96, "num_key_value_heads": 2}
HEAD_MAP = ((0.1, 0.8), (0.7, 0.3), (0.8, 0.5))
"""A head map of its layers and KV heads."""
POLICY_OPTIONS: dict[str, dict[str, Any]] = {
    "cake": {"tau1": 1.0, "tau2": 1.0},
    "duo_attention": {"head_map": HEAD_MAP, "sinks": 3},
    "kvzap": {"weights": "never read"},
    "vatp": {"indicator": "scissorhands"},
}
"""What policies need to be told, and options that few tests would try otherwise."""
_FILES = tempfile.TemporaryDirectory(prefix="kvpass-tests-")


def write_kvzap(path: str | Path, layers: int = 3, kv_heads: int = 2, hidden: int = 64) -> None:
    """Write random maps of policy ``kvzap``, of no model in particular, with shares of heads."""
    generator = torch.Generator().manual_seed(7)
    tensors = {"head_shares": torch.rand(layers, kv_heads, generator=generator)}
    for layer in range(layers):
        tensors[f"module_list.{layer}.weight"] = torch.randn(kv_heads, hidden, generator=generator)
        tensors[f"module_list.{layer}.bias"] = torch.randn(kv_heads, generator=generator)
    save_file(tensors, path)


@functools.cache
def kvzap_file(layers: int = 3, kv_heads: int = 2, hidden: int = 64) -> str:
    """Return the path of a file of :func:`write_kvzap`; by default it fits models of ``LLAMA_LIKE``."""
    path = Path(_FILES.name, f"{layers}-{kv_heads}-{hidden}.safetensors")
    write_kvzap(path, layers, kv_heads, hidden)
    return str(path)


@functools.cache
def statistics_file(heads: tuple[int, int, int] = (2, 2, 2), dim: int = 16) -> str:
    """Return the path of a file of random statistics of queries, of layers, KV heads and query heads of each."""
    path = Path(_FILES.name, f"statistics-{'-'.join(map(str, heads))}-{dim}.safetensors")
    generator = torch.Generator().manual_seed(7)
    sizes = {"query_mean": (dim,), "query_modulus": (dim // 2,), "query_covariance": (dim, dim)}
    save_file({name: torch.rand(*heads, *size, generator=generator) for name, size in sizes.items()}, path)
    return str(path)


_SLIDING = {**LLAMA_LIKE, "head_dim": 16, "sliding_window": 24}
_FIRST_SLIDES = {"layer_types": ["sliding_attention", "full_attention", "full_attention"]}
_FALCON = {**_LAYERED, "new_decoder_architecture": False}
_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
LATENT_LIKE = {**LLAMA_LIKE, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24}
LATENT_LIKE |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12}
_LATENT_EXPERTS: dict[str, Any] = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
_LATENT_EXPERTS |= {"moe_intermediate_size": 32}
_SECOND_HAS_EXPERTS = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def _with_types(families: dict[str, dict[str, Any]], **types: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Model type and configuration of each family; the type is the family's name unless another is given."""
    return {family: (types.get(family, family), options) for family, options in families.items()}


FAMILIES = _with_types(
    {
        "llama": LLAMA_LIKE,
        "llama_mha": {**LLAMA_LIKE, "num_key_value_heads": 4},
        "qwen3": {**LLAMA_LIKE, "head_dim": 24},
        "mistral": {**LLAMA_LIKE, "sliding_window": None},
        "phi3": {**LLAMA_LIKE, "sliding_window": None},
        "mixtral": {**LLAMA_LIKE, "sliding_window": None, "num_local_experts": 4},
        "olmo2": LLAMA_LIKE,
        "qwen2": LLAMA_LIKE,
        "qwen3_moe": {**LLAMA_LIKE, "head_dim": 16, **_EXPERTS},
        "mistral_sliding": {**LLAMA_LIKE, "sliding_window": 24},
        # SDPA leaves soft-capping out, at least up to transformers 5.17
        "gemma2": {**_SLIDING, "query_pre_attn_scalar": 16, "attn_implementation": "eager"},
        "gemma3": {**_SLIDING, **_FIRST_SLIDES, "query_pre_attn_scalar": 16},
        "gpt_oss": _SLIDING
        | _FIRST_SLIDES
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": _ROPE},
        "phi": LLAMA_LIKE,
        "starcoder2": {**LLAMA_LIKE, "sliding_window": None},
        "granite": LLAMA_LIKE,
        "cohere2": {**LLAMA_LIKE, **_FIRST_SLIDES, "sliding_window": 24},
        "smollm3": {**LLAMA_LIKE, "no_rope_layers": [1, 0, 1]},
        "gpt_neo": _HIDDEN
        | {"intermediate_size": 96, "num_layers": 3, "num_heads": 4, "window_size": 24, "max_position_embeddings": 256}
        | {"attention_types": [[["local", "global", "global"], 1]]},
        "gptj": {**_COMMON, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 2048, "rotary_dim": 8},
        "bloom": {**_COMMON, "hidden_size": 64, "n_layer": 3, "n_head": 4},
        "mpt": {**_COMMON, "d_model": 64, "n_heads": 4, "n_layers": 3, "max_seq_len": 256, "use_cache": True},
        "falcon": {**_FALCON, "multi_query": True, "parallel_attn": True, "bias": False, "alibi": False},
        "falcon_alibi": {**_FALCON, "multi_query": False, "parallel_attn": False, "bias": True, "alibi": True},
        "deepseek_v3": {**LATENT_LIKE, **_LATENT_EXPERTS, "first_k_dense_replace": 1},
        "gpt_neox": {**_LAYERED, "intermediate_size": 96},
        "diffllama": LLAMA_LIKE,
        "llama4": LLAMA_LIKE
        | {"head_dim": 16, "intermediate_size_mlp": 96, "num_local_experts": 4, "num_experts_per_tok": 1}
        | {"moe_layers": [1], "no_rope_layers": [1, 0, 1], "attention_chunk_size": 24, "floor_scale": 16}
        | {"attn_scale": 0.5, "rope_parameters": _ROPE},
        "gpt2": {**_COMMON, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 2048},
        "xglm": _COMMON
        | {"d_model": 64, "ffn_dim": 96, "num_layers": 3, "attention_heads": 4, "max_position_embeddings": 256},
        "opt": {**_LAYERED, "word_embed_proj_dim": 64, "ffn_dim": 96},
    },
    llama_mha="llama",
    mistral_sliding="mistral",
    gemma3="gemma3_text",
    falcon_alibi="falcon",
    llama4="llama4_text",
)
"""Model type and configuration of the supported families, three layers each."""
ROTATED = [
    *("llama", "llama_mha", "qwen3", "mistral", "mixtral", "olmo2", "qwen2", "qwen3_moe", "gemma2", "gemma3"),
    *("starcoder2", "granite", "diffllama", "falcon", "phi3", "gpt_oss"),
]
"""Families in all layers of which the rotary embedding is found that some policies read."""
ALIBI = ["bloom", "mpt", "falcon_alibi"]
"""Families whose keys hold positions in kvpass, so that policies that score keys are refused."""
LATENT = _with_types(
    {
        "deepseek_v2": {**LATENT_LIKE, **_LATENT_EXPERTS, "first_k_dense_replace": 1},
        "glm4_moe_lite": {**LATENT_LIKE, **_LATENT_EXPERTS, **_SECOND_HAS_EXPERTS},
        "minicpm3": LATENT_LIKE,
        "mistral4": LATENT_LIKE
        | _LATENT_EXPERTS
        | {"head_dim": 8}
        | {"rope_parameters": _ROPE | {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 32}},
        "youtu": LATENT_LIKE,
        "axk1": {**LATENT_LIKE, **_LATENT_EXPERTS, **_SECOND_HAS_EXPERTS},
    }
)
"""The same of families that this version of transformers has, which cache a latent, besides deepseek_v3."""
LATENT = {family: made for family, made in LATENT.items() if made[0] in CONFIG_MAPPING}
FAMILIES |= LATENT
if Version(transformers.__version__) < Version("5.15"):  # it makes falcon's mask by torch.vmap
    FAMILIES = {family: made for family, made in FAMILIES.items() if made[0] != "falcon"}
_LINEAR = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
_FOUR = {**LLAMA_LIKE, "num_hidden_layers": 4}
_CONVOLUTION = {**_FOUR, "layer_types": ["conv", "full_attention"] * 2}
_MAMBA = {**_FOUR, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_expand": 1}
_MAMBA |= {"mamba_chunk_size": 16}
_DELTA_RULE = {**_FOUR, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
_DELTA_RULE |= {"linear_value_head_dim": 16, "layer_types": _LINEAR}
_LATENT_LINEAR = {**_LATENT_EXPERTS, "num_hidden_layers": 4, "num_local_experts": 4, "layer_types": _LINEAR}
_LATENT_LINEAR |= {"mlp_layer_types": ["dense", "sparse", "dense", "dense"]}
_SHARED_EXPERT = {**_EXPERTS, "head_dim": 16, "shared_expert_intermediate_size": 32}
HYBRIDS = _with_types(
    {
        "lfm2": _CONVOLUTION,
        "lfm2_moe": {**_CONVOLUTION, **_EXPERTS, "num_dense_layers": 1},
        "granitemoehybrid": _MAMBA | {"layer_types": _LINEAR, "num_local_experts": 4, "shared_intermediate_size": 32},
        "bamba": {**_MAMBA, "attn_layer_indices": [1, 3]},
        "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64},
        "nemotron_h": LLAMA_LIKE
        | {"layers_block_type": ["mamba", "attention", "mlp", "mamba", "attention", "moe"], "num_hidden_layers": 6}
        | {"head_dim": 16, "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 8}
        | {"chunk_size": 16, "n_routed_experts": 4, "moe_intermediate_size": 32}
        | {"moe_shared_expert_intermediate_size": 32},
        "zamba2": _FOUR
        | {"num_key_value_heads": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "n_mamba_heads": 4}
        | {"mamba_ngroups": 2, "mamba_d_state": 8, "mamba_expand": 1, "mamba_headdim": 16, "chunk_size": 16},
        "qwen3_next": {**_DELTA_RULE, **_SHARED_EXPERT},
        "qwen3_5": {**_DELTA_RULE, "head_dim": 16},
        "qwen3_5_moe": {**_DELTA_RULE, **_SHARED_EXPERT},
        "olmo_hybrid": _DELTA_RULE,
        "jamba": _FOUR
        | {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4}
        | {"mamba_d_state": 8, "mamba_expand": 1, "mamba_dt_rank": 8},
        "kimi_linear": LATENT_LIKE
        | _LATENT_LINEAR
        | {"q_lora_rank": None, "linear_head_dim": 16, "linear_num_heads": 4},
        "bailing_hybrid": {**LATENT_LIKE, **_LATENT_LINEAR, "head_dim": 16},
    },
    qwen3_5="qwen3_5_text",
    qwen3_5_moe="qwen3_5_moe_text",
)
"""The same of families with recurrent layers beside attention, which need transformers 5.22."""
_NEWEST = _with_types(
    {
        "exaone": LLAMA_LIKE,
        "apertus1p5": LLAMA_LIKE,
        "sarvam_moe": {**LLAMA_LIKE, **_LATENT_EXPERTS, "head_dim": 16, "first_k_dense_replace": 1},
        "sarvam_mla": {**LATENT_LIKE, **_LATENT_EXPERTS, "q_lora_rank": None, "first_k_dense_replace": 1},
        "dory": _SLIDING | {"num_hidden_layers": 6, "n_input_layers": 2, "n_output_layers": 2, "rope_parameters": None},
        "lara_mini": _DELTA_RULE
        | _SHARED_EXPERT
        | {"layer_types": ["linear_attention", "sliding_attention", "linear_attention", "full_attention"]}
        | {"sliding_window": 24},
    },
    apertus1p5="apertus1p5_text",
)
NEWEST = {family: made for family, made in _NEWEST.items() if made[0] in CONFIG_MAPPING}
"""The same of families that transformers has from 5.24 on."""
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def tiny_model(
    family: str, *, layers: int | None = None, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
) -> PreTrainedModel:
    """A model of the family with random weights, in eval mode.

    Weights are drawn wide enough (std 0.1) that attention is far from uniform, so that which entries are kept matters.

    Args:
        layers: how many, if not as many as :data:`FAMILIES` has: the first ones. changes: of the configuration.
    """
    model_type, options = (FAMILIES | HYBRIDS | NEWEST)[family]
    options = {**options, **changes}
    if layers is not None:
        options[next(name for name in _LAYERS if name in options)] = layers
        if "attention_types" in options:
            options["attention_types"] = [[options["attention_types"][0][0][:layers], 1]]
    for by_layer in ("layer_types", "layers_block_type", "no_rope_layers", "mlp_layer_types"):
        if by_layer in options:
            options[by_layer] = options[by_layer][: options["num_hidden_layers"]]
    experts = family in {"mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"}
    if experts and Version(transformers.__version__) < Version("5.17"):
        options = {**options, "experts_implementation": "batched_mm"}  # its grouped_mm traces only in bf16
    config = AutoConfig.for_model(model_type, **options)
    config.initializer_range = 0.1
    torch.manual_seed(seed)
    if type(config) in AutoModelForCausalLM._model_mapping:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    else:  # the text part of a model of images and text
        model = getattr(transformers, type(config).__name__.replace("Config", "ForCausalLM"))(config).to(dtype).eval()
    for name, weight in model.named_parameters():
        if "k_norm" in name:  # else all keys have one norm but for rounding, which knorm would sort them by
            torch.nn.init.normal_(weight)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def added_in_place(model: Any) -> Any:
    """The llama model, whose layers now add attention to the residual stream in place."""

    def forward(self: Any, hidden_states: Tensor, **given: Any) -> Tensor:
        hidden_states += self.self_attn(hidden_states=self.input_layernorm(hidden_states), **given)[0]
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))

    for layer in model.model.layers:
        layer.__class__ = type("AddsInPlace", (type(layer),), {"forward": forward})
    return model


def compiled_once(
    family: str = "llama",
    *,
    layers: int | None = None,
    backend: Compiler = "inductor",
    recompress: Recompress = "never",
    entries: EntryFormat = "model",
    changes: Mapping[str, Any] | None = None,
    policy: str = "lava",
    budget: int | float | str | None,
    **options: Any,
) -> tuple[PreTrainedModel, Any]:
    """A tiny model and its compiled copy, shared by all tests that change nothing of it but policy and budget.

    Args:
        layers, changes: of the model, see :func:`tiny_model`. options: of the policy.
    """
    model, fast = _compiled_once(family, layers, backend, recompress, entries, tuple((changes or {}).items()))
    fast.set_policy(policy, budget, **options)
    return model, fast


@functools.cache
def _compiled_once(
    family: str,
    layers: int | None,
    backend: Compiler,
    recompress: Recompress,
    entries: EntryFormat,
    changes: tuple[tuple[str, Any], ...],
) -> Any:
    model = _tiny_once(family, layers, changes)
    given: dict[str, Any] = {"policy": "snapkv", "budget": 1.0, "recompress": recompress, "entries": entries}
    fast = kvpass.compile(model, backend=backend, **given)
    return model, sharing_captures(fast, family, layers, backend, changes)


@functools.cache
def _tiny_once(family: str, layers: int | None, changes: tuple[tuple[str, Any], ...]) -> PreTrainedModel:
    return tiny_model(family, layers=layers, **dict(changes))


CAPTURES: dict[Hashable, Any] = {}


def sharing_captures(fast: Any, *key: Hashable) -> Any:
    """A compiled model with the captures of the first one of its key; tracing a decoder takes most of a small test.

    Args:
        key: equal for models with the same weights, backend and regions: the decoder is then one and the same graph,
            whatever policies, budgets and formats of entries are.
    """
    fast._kvpass.captures = CAPTURES.setdefault(key, fast._kvpass.captures)
    return fast


@contextmanager
def in_blocks(fast: Any, block: int) -> Iterator[None]:
    """A compiled model that tests share reads prompts in blocks of so many tokens inside."""
    fast.prefill_block = block
    try:
        yield
    finally:
        fast.prefill_block = "auto"


def continuation(fast: Any, cache: Any) -> Tensor:
    """Logits of two rows of random tokens after a cache, in steps and longer calls."""
    logits = []
    for tokens in (1, 1, 4, 9, 1):
        out = fast(random_ids(2, tokens, seed=tokens), past_key_values=cache)
        cache = out.past_key_values
        logits.append(out.logits)
    return torch.cat(logits, 1)


def raw(module: Any, options: dict[str, Any], *, dynamic: bool = True) -> Any:
    """A module or function compiled by the backend, as if nothing had been captured of its class before."""
    # not torch._dynamo.reset: the models that tests share would be captured again too
    torch._dynamo.eval_frame.remove_from_cache(module)
    torch._dynamo.pgo.reset_code_state()  # lengths that were seen
    return torch.compile(module, backend="kvpass", fullgraph=True, dynamic=dynamic, options=options)


def in_session(fast: Any, sizes: list[int], *inputs: Tensor, **given: Any) -> tuple[Tensor, Any]:
    """Logits of a text, ids ``[B, T]`` first, that a raw module reads in pieces, and the cache of their session."""
    with torch.no_grad(), kvpass.session(**given) as session:
        pieces = zip(*(x.split(sizes, 1) for x in inputs), strict=True)
        logits = [fast(*(x.contiguous() for x in piece)) for piece in pieces]
    return torch.cat(logits, 1), session.cache


def random_ids(rows: int, tokens: int, *, seed: int = 0) -> Tensor:
    """Token ids without padding, int64 ``[rows, tokens]``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCABULARY, (rows, tokens), generator=generator)


def left_pad(prompts: list[Tensor], pad: int = 0) -> tuple[Tensor, Tensor]:
    """Prompts ``[n_i]`` as one left-padded batch: ids and attention mask, int64 ``[B, max n_i]``."""
    width = max(prompt.numel() for prompt in prompts)
    ids = torch.full((len(prompts), width), pad)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - prompt.numel() :] = prompt
        mask[row, width - prompt.numel() :] = 1
    return ids, mask
