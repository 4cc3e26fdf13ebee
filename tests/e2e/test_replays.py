"""Policies that replay a prompt: kept sets against transformers' own attention, and what is refused."""

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

import kvpass
from compiled_models import padded, prompts_of, two_layers
from pairwise import quick
from recorded_calls import inputs_and_outputs
from tiny_models import FAMILIES, HYBRIDS, LATENT, added_in_place, random_ids, tiny_model

ASKED = {"sinks": 3, "chunk": 12, "overlap": 5, "prompt_ids": (5, 6, 7), "again_ids": (9, 8), "suffix_ids": (11,)}
BUDGET = 9
WITH_ATTENTIONS = [name for name in FAMILIES if name not in ("mistral_sliding", "diffllama", "falcon_alibi")]
WITH_ATTENTIONS += [name for name in ("lfm2", "falcon_h1", "qwen3_5") if name in HYBRIDS]
"""Without those that have no layer under the budget, whose attention is the difference of two, or another one when it
is asked for (falcon_alibi's logits then differ)."""
UNEVEN = "olmo2"
"""What enters its attention is not normalised, so that norms of tokens differ: tried in every run."""
PROJECTIONS = ("o_proj", "out_proj", "dense", "c_proj")
TRIED = [
    *((family, "kvzip") for family in WITH_ATTENTIONS),
    *((family, "kvzip_plus") for family in WITH_ATTENTIONS if family not in ("deepseek_v3", *LATENT)),
]


def attended_most(model: PreTrainedModel, ids: Tensor, kv_heads: int, *, weighed: bool) -> Tensor:
    """What the replays of ``ASKED`` attend to in the whole model, run as one text each, ``[L, K, N]``.

    Args:
        weighed: by the norms of KVzip+.
    """
    first, n, found = ASKED["sinks"], ids.shape[1], []
    modules, weights = zip(*attention_modules(model), strict=True)
    for begin in range(first, n, ASKED["chunk"]):
        end = min(begin + ASKED["chunk"], n)
        before = ids[0, begin - ASKED["overlap"] : begin].tolist()
        lead = [*ASKED["again_ids"], *before] if begin > first else [*ASKED["prompt_ids"]]
        own = torch.tensor([[*lead, *ASKED["suffix_ids"], *ids[0, begin:end].tolist()]])
        with torch.no_grad(), inputs_and_outputs(modules) as entered:
            out = model(torch.cat([ids, own], 1), output_attentions=True, use_cache=weighed)
        seen = [*range(first), *range(begin, end), *range(n, n + own.shape[1])]
        held = [layer for layer in out.past_key_values.layers if hasattr(layer, "values")] if weighed else []
        for layer, attention in enumerate(out.attentions):
            rows = attention[0, :, n:]
            part = rows[..., seen] / (rows[..., seen].sum(-1, keepdim=True) + 1 - rows.sum(-1, keepdim=True))
            if len(found) <= layer:
                found.append(torch.zeros(kv_heads, n))
            paid = part[..., first : first + end - begin]
            if weighed:
                (x, _), weight = entered[layer], weights[layer]
                values = held[layer].values[0].repeat_interleave(len(rows) // kv_heads, 0)
                if values.shape[1] != n + own.shape[1]:
                    continue  # a sliding window
                worth = (values @ weight.unflatten(1, (len(rows), -1)).permute(1, 2, 0)).norm(dim=-1)
                paid = paid * worth[:, None, begin:end] / x[0, n:].norm(dim=-1)[:, None]
            found[layer][:, begin:end] = paid.amax(1).unflatten(0, (kv_heads, -1)).amax(1)
    return torch.stack(found)


def attention_modules(model: PreTrainedModel) -> list[tuple[torch.nn.Module, Tensor]]:
    """Each attention module, and the weight ``[hidden, H * D]`` of its last linear layer."""
    found = []
    for module in model.modules():
        below = dict(module.named_children())
        name = next((name for name in PROJECTIONS if name in below), None)
        if name is not None and type(module).__name__.endswith("Attention"):
            found.append((module, below[name].weight.T if isinstance(below[name], Conv1D) else below[name].weight))
    return found


def kept_by(worth: Tensor) -> list[list[list[int]]]:
    """Positions of the first entries and the best others of all layers and heads, of ``[L, K, N]``."""
    worth[..., : ASKED["sinks"]] = torch.inf
    best = worth.flatten().topk(min(BUDGET, worth.shape[2]) * worth.shape[0] * worth.shape[1]).indices
    keep = torch.zeros(worth.numel(), dtype=torch.bool).scatter(0, best, True).view(worth.shape)
    return [[head.nonzero().flatten().tolist() for head in layer] for layer in keep]


@pytest.mark.parametrize("tried", quick(TRIED, [(UNEVEN, "kvzip_plus")]), ids="-".join)
def test_entries_that_a_repetition_attends_to_are_kept_in_padded_rows_too(tried):
    family, policy = tried
    _, fast = two_layers(family, policy=policy, budget=BUDGET, window=None, **ASKED)
    eager = tiny_model(family, layers=2, attn_implementation="eager")
    cache = fast.compress(*padded(41, 19))
    for row, prompt in enumerate(prompts_of(41, 19)):
        worth = attended_most(eager, prompt[None], cache.lengths.shape[2], weighed=policy == "kvzip_plus")
        positions = [[head[head >= 0].tolist() for head in layer] for layer in cache.positions[row]]
        assert positions == kept_by(worth[list(cache.layer_ids)])


def test_a_prompt_that_leaves_no_positions_for_its_replays_is_refused_and_a_shorter_one_is_not():
    model = tiny_model("gpt2", layers=1, n_positions=64)
    fast = kvpass.compile(model, policy="kvzip", budget=BUDGET, backend="eager")
    with pytest.raises(ValueError, match="replays 36 tokens behind a prompt of 40, but the decoder does not take more"):
        fast.compress(random_ids(1, 40))
    assert fast.compress(random_ids(1, 33)).columns == 33
    fast.set_policy("kvzip", BUDGET, chunk=10)
    assert fast.compress(random_ids(1, 46)).columns == 46


def test_unknown_ids_a_decoder_that_is_not_split_into_layers_and_a_raw_module_are_refused():
    _, fast = two_layers(policy="kvzip", budget=BUDGET, window=None, prompt_ids=(3, 999))
    with pytest.raises(ValueError, match="'kvzip' replays tokens, of which input_ids has the value 999"):
        fast(random_ids(1, 30))
    model = added_in_place(tiny_model("llama", layers=1))
    fast = kvpass.compile(model, policy="kvzip", budget=BUDGET, backend="eager")
    with pytest.raises(ValueError, match=r"not split into layers: .* writes into a tensor of another part"):
        fast(random_ids(1, 30))
    compiled = torch.compile(lambda x: x + 1, backend="kvpass", options={"policy": "kvzip", "budget": BUDGET})
    with pytest.raises(Exception, match=r"replays token ids behind a prompt, which only kvpass\.compile knows"):
        compiled(torch.ones(2))
