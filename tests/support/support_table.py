"""The tables of decoders in docs/models.md, made from what the tests' tiny models report.

``make support-table`` replaces them. The tests compare each family and each refusal with them, so they say what was
found in the traced graphs. Of types that the tests do not have, a third table says what ``scripts/try-decoders``
recorded in ``benchmarks/decoders.json``.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.progress import track
from transformers import CONFIG_MAPPING, AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import kvpass
from kvpass.errors import UnsupportedAttentionError
from kvpass.eval.tables import markdown_table
from kvpass.frontends.transformers import CompressedModel
from tiny_models import FAMILIES, HYBRIDS, LATENT_LIKE, LLAMA_LIKE, NEWEST, VOCABULARY, random_ids, tiny_model

_FOUND_BY = {
    "find_attention": "`scaled_dot_product_attention`, found in the graph",
    "find_eager_attention": "matmul, softmax, matmul, found in the graph",
}
_VARIANTS = {
    "llama_mha": "llama with as many KV heads as heads",
    "mistral_sliding": "mistral with a sliding window",
    "falcon_alibi": "falcon with ALiBi",
}
_HEADERS = ("decoder", "its attention is found through", "note"), ("refused", "because")
_BEGIN, _END = "<!-- made by make support-table -->\n\n", "\n<!-- end -->"
_OTHERS_BEGIN, _OTHERS_END = "<!-- other types, by make support-table -->\n\n", "\n<!-- end of other types -->"
RECORD = Path(__file__).resolve().parents[2] / "benchmarks" / "decoders.json"
"""What ``scripts/try-decoders`` found."""

_TINY = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0}
_ONE_LAYER = {name: value for name, value in LATENT_LIKE.items() if name != "num_hidden_layers"} | {"num_layers": 1}
REFUSED: dict[str, dict[str, Any]] = {
    "mamba": {**_TINY, "num_hidden_layers": 1, "state_size": 4},
    "falcon_mamba": {**_TINY, "num_hidden_layers": 1, "state_size": 4},
    "rwkv": {**_TINY, "attention_hidden_size": 32},
    "minimax": LLAMA_LIKE
    | {"num_local_experts": 2, "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    "recurrent_gemma": {**LLAMA_LIKE, "lru_width": 64, "attention_window_size": 24, "head_dim": 16},
    "zamba": LLAMA_LIKE
    | {"num_hidden_layers": 4, "num_key_value_heads": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2}
    | {"mamba_d_state": 4, "mamba_expand": 1, "mamba_dt_rank": 4},
    "deepseek_v32": FAMILIES["deepseek_v3"][1]
    | {"first_k_dense_replace": 3, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 8},
    "longcat_flash": _ONE_LAYER
    | {"head_dim": 8, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 32}
    | {"n_routed_experts": 4, "zero_expert_num": 2, "moe_topk": 2},
    "dbrx": {"vocab_size": VOCABULARY, "d_model": 32, "n_heads": 4, "n_layers": 1, "max_seq_len": 64}
    | {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4},
    },
    "zaya": LLAMA_LIKE | {"head_dim": 16, "num_experts": 4, "moe_intermediate_size": 32, "router_hidden_size": 16},
    "inkling2_text": LLAMA_LIKE | {"head_dim": 16},
    "openai-gpt": {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 1, "n_head": 4},
    "xlm": {"vocab_size": VOCABULARY, "emb_dim": 32, "n_layers": 2, "n_heads": 4},
    "xlnet": {"vocab_size": VOCABULARY, "d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 64},
    "bert": {**_TINY, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64},
    "t5": {**_TINY, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4},
}
"""Model types that fail closed, with a tiny configuration of each."""
_OF_VERSIONS = {
    r"\bs\d+\b": "tokens",
    r": \w+ needs \w+, which has no example": "",
    r", line \d+, (`.*?`): .*": r", \1",
}
"""What reasons say in words that differ between versions of torch and transformers: nodes, lines, torch's advice."""


def supported_row(family: str, model: CompressedModel) -> list[str]:
    """Name, how attention is met, and what is special, of a compiled model that has prefilled a prompt."""
    prefill = model.report().compiled[0]
    found = [_FOUND_BY[record.name] for record in prefill.passes if record.sites and record.name in _FOUND_BY]
    config = model.config
    groups = (*prefill.layout.pools, *prefill.layout.rings)
    latent = any(group.geometry.values_in_keys for group in groups)
    notes = {
        "sliding layers keep a ring": any(not ring.chunked for ring in prefill.layout.rings),
        "chunked layers keep a chunk": any(ring.chunked for ring in prefill.layout.rings),
        "soft-capping": getattr(config, "attn_logit_softcapping", None) is not None,
        "sinks": any(name.endswith("sinks") for name, _ in model.named_parameters()),
        "ALiBi as two more columns of queries and keys": any(
            record.name == "fold_alibi" and record.sites for record in prefill.passes
        ),
        "recurrent layers keep states outside the budget": bool(prefill.layout.states),
        "two attention ops a layer, each with keys and values of its own": not prefill.layout.states
        and prefill.sites > config.num_hidden_layers,
        "one KV head": all(group.geometry.kv_heads == 1 for group in groups) and not latent,
        "not beyond the end of its table of positions": model._kvpass.captures.longest is not None,
        "latent rows are cached, one for all heads, as transformers does": latent,
    }
    return [
        _VARIANTS.get(family, family),
        " and ".join(found) or "attention interface of transformers",
        ", ".join(note for note, holds in notes.items() if holds),
    ]


def refused_row(model_type: str) -> list[str]:
    """Model type, and why a tiny model of it is refused.

    Raises:
        AssertionError: it is not.
    """
    config = AutoConfig.for_model(model_type, **REFUSED[model_type])
    torch.manual_seed(0)
    causal = type(config) in AutoModelForCausalLM._model_mapping
    model: PreTrainedModel = (AutoModelForCausalLM if causal else AutoModel).from_config(config).eval()
    try:
        kvpass.compile(model, policy="full", backend="eager")(random_ids(1, 20))
    except ValueError as refusal:
        reason = refusal.reason if isinstance(refusal, UnsupportedAttentionError) else str(refusal)
    else:
        raise AssertionError(f"{model_type} was not refused")
    for words, instead in _OF_VERSIONS.items():
        reason = re.sub(words, instead, reason)
    return [model_type, reason]


def tables(supported: Iterable[list[str]], refused: Iterable[list[str]]) -> str:
    """Both tables as Markdown; decoders of which the same is said share a row."""
    return "\n".join(
        markdown_table(header, _grouped(rows), left=len(header))
        for header, rows in zip(_HEADERS, (supported, refused), strict=True)
    )


def listed(text: str) -> list[list[str]]:
    """The rows of both tables in a text, a decoder each."""
    lines = text.split(_BEGIN)[1].split(_END)[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    rows = [row for row in cells if len(row) > 1 and tuple(row) not in _HEADERS and row[0] != "---"]
    return [[name, *said] for names, *said in rows for name in names.split(", ")]


def others(record: Path = RECORD) -> str:
    """What was found of each causal type of the installed transformers that the tests do not have, as Markdown."""
    found = {
        name: (result, reason, run["versions"]["transformers"])
        for run in json.loads(record.read_text())
        for name, (result, reason) in run["decoders"].items()
    }
    types = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} & {*CONFIG_MAPPING}
    untested = types - {model_type for model_type, _ in (FAMILIES | HYBRIDS | NEWEST).values()} - {*REFUSED}
    rows = []
    for name in sorted(untested):
        result, reason, version = found.get(name, ("not tried", "", ""))
        reason = re.sub(r"^\w+: (cannot compress attention in .*?\): )?|`", "", reason).replace("|", "\\|")
        rows.append([name, f"{result}: {reason}" if result in ("refused", "DIFFERENT") and reason else result, version])
    order = ("same", "refused", "not tried", "DIFFERENT")
    rows.sort(key=lambda row: order.index(row[1].partition(":")[0]))
    said = f"Of the {len(types)} types of transformers {transformers.__version__} the tests lack {len(untested)}:\n\n"
    header = ("decoder", "`scripts/try-decoders`", "with transformers")
    return said + markdown_table(header, _grouped(rows), left=len(header))


def others_listed(text: str) -> str:
    """The part of a text that :func:`others` made."""
    return text.split(_OTHERS_BEGIN)[1].split(_OTHERS_END)[0]


def _replaced(text: str, begin: str, end: str, made: str) -> str:
    head, rest = text.split(begin)
    return head + begin + made + end + rest.split(end)[1]


def _grouped(rows: Iterable[list[str]]) -> list[list[str]]:
    names: dict[tuple[str, ...], list[str]] = {}
    for name, *said in rows:
        names.setdefault(tuple(said), []).append(name)
    return [[", ".join(alike), *said] for said, alike in names.items()]


def main(readme: Annotated[Path, typer.Argument(help="File whose tables are replaced.")]) -> None:
    """Compile a tiny model of every family, refuse what is refused, and write both tables."""
    supported = []
    for family in track({**FAMILIES, **HYBRIDS}, description="families"):
        fast = kvpass.compile(tiny_model(family), policy="full", backend="eager")
        fast(random_ids(1, 20))
        supported.append(supported_row(family, fast))
    refused = [refused_row(model_type) for model_type in track(REFUSED, description="refused")]
    text = _replaced(readme.read_text(), _BEGIN, _END, tables(supported, refused))
    readme.write_text(_replaced(text, _OTHERS_BEGIN, _OTHERS_END, others()))


if __name__ == "__main__":
    typer.run(main)
