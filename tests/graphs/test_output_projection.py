"""The output projection that a policy reads is the linear layer after attention, head by head, or it is refused."""

import pytest
import torch
from torch import nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

import kvpass
from kvpass.ops import reference
from numeric_checks import assert_close
from pairwise import quick, quick_rows
from recorded_calls import inputs_and_outputs
from small_decoders import WIDTH, SmallDecoder
from tiny_models import ALIBI, FAMILIES, LATENT, ROTATED, compiled_once, kvzap_file, random_ids, tiny_model

PROJECTIONS = ("o_proj", "out_proj", "dense", "c_proj")
LATENTS = {"deepseek_v3", *LATENT}
"""Latents are expanded before it, where transformers caches them."""
UNFOUND = {"diffllama", *(LATENTS if hasattr(DeepseekV3Attention, "expand_kv") else ())}
"""Families whose attention is changed before it: diffllama subtracts two attention ops."""
SLIDING = {"mistral_sliding"}
"""Families whose layers all have a sliding window, which no policy scores."""


def results_of_projections(model, ids):
    """What the output projections of a model give, without their bias, ``[1, N, hidden]`` each."""
    modules = {path: module for path, module in model.named_modules() if "mlp" not in path}
    projections = [module for path, module in modules.items() if path.rsplit(".", 1)[-1] in PROJECTIONS]
    biases = [getattr(module, "bias", None) for module in projections]
    with torch.no_grad(), inputs_and_outputs(projections) as found:
        model(ids, use_cache=False)
    return [out if bias is None else out - bias for (_, out), bias in zip(found, biases, strict=True)]


@pytest.mark.parametrize("family", quick(sorted(FAMILIES.keys() - UNFOUND - SLIDING), ["llama", "gpt2"]))
def test_attention_times_the_projection_given_is_what_the_layer_adds(family, judged):
    model, fast = compiled_once(family, layers=2, policy="criticalkv", budget=24, window=8, backend="eager")
    ids = random_ids(1, 40)
    fast(ids)
    wanted = results_of_projections(model, ids)
    assert judged
    found = []
    for call, inputs in judged:
        every = call._replace(q=call.q[:, :, -8:])  # rows of which the policy has queries
        out = reference.causal_attention(every).transpose(1, 2).flatten(2) @ inputs.projection.T
        found.append(min(float((out - result[:, -8:]).detach().abs().max()) for result in wanted if result.dim() == 3))
    assert max(found) < 1e-4


PROJECTION = {"policy": "criticalkv", "window": 8}, "output projection of the layer"
ROTATION = {"policy": "expected_attention"}, "rotary embedding of the queries"
LACKING = [
    *((family, *PROJECTION) for family in sorted(UNFOUND)),
    *((family, *ROTATION) for family in sorted(FAMILIES.keys() - {*ROTATED, *ALIBI} - SLIDING)),
    ("deepseek_v3", {"policy": "kvzip_plus"}, "output projection"),
    ("deepseek_v3", {"policy": "kvzap", "window": 4, "weights": kvzap_file(2, 1)}, "what enters"),
    ("diffllama", {"policy": "kvzip_plus"}, "output projection"),
]
OFTEN = [("diffllama", *PROJECTION), ("gpt_neox", *ROTATION), LACKING[-2]]
"""Families, policies, and what these read and do not find there."""


@pytest.mark.parametrize(("family", "given", "what"), quick_rows(LACKING, OFTEN))
def test_a_model_without_what_a_policy_reads_is_refused_and_works_with_another_policy(family, given, what):
    layers = 1 if (family, given, what) in OFTEN else 2
    _, fast = compiled_once(family, layers=layers, budget=24, backend="eager", **given)
    with pytest.raises(kvpass.UnsupportedAttentionError, match=f"needs .*{what}"):
        fast(random_ids(1, 40), logits_to_keep=1)
    fast.set_policy("snapkv", 24, window=8)
    kept = fast(random_ids(1, 40), logits_to_keep=1).past_key_values.lengths
    assert kept.sum() == 24 * kept.numel()


BETWEEN = {
    "a gate": lambda y, x: y * x.sigmoid(),
    "a gate in front": lambda y, x: nn.functional.silu(x) * y,
    "no gate": lambda y, x: y * x,
    "a gate of its own": lambda y, x: y * y.sigmoid(),
}


class Decoder(SmallDecoder):
    """One layer of attention; ``between`` changes its output before the projection."""

    def __init__(self, between: str) -> None:
        super().__init__()
        self.out, self.between = nn.Linear(WIDTH, WIDTH), BETWEEN[between]

    def layer(self, x, positions, i):
        return x + self.out(self.between(self.of_attention(x, positions, i), x))


@pytest.mark.parametrize("between", sorted(BETWEEN))
def test_another_module_is_compressed_if_its_linear_layer_reads_attention_at_most_gated(between, judged):
    module, ids = Decoder(between), random_ids(1, 30)
    options = {"policy": "criticalkv", "budget": 16, "window": 4, "compiler": "eager"}
    compiled = torch.compile(module, backend="kvpass", dynamic=True, options=options)
    if between not in ("a gate", "a gate in front"):
        refused = pytest.raises(kvpass.UnsupportedAttentionError, match="needs the output projection of the layer")
        with refused, torch.no_grad(), kvpass.session():
            compiled(ids)
        return
    with torch.no_grad(), kvpass.session():
        assert_close("logits", compiled(ids), module(ids), atol=1e-5)
    ((_, inputs),) = judged
    assert inputs.projection is module.out.weight


@pytest.mark.parametrize(
    ("family", "policy"), [("gpt2", {"policy": "criticalkv", "window": 8}), ("llama", {"policy": "expected_attention"})]
)
def test_one_token_has_it_too(family, policy):
    """Or the rotary embedding."""
    model, ids = tiny_model(family, layers=1), random_ids(2, 3)
    fast = kvpass.compile(model, **policy, budget=24, backend="eager")
    cache = (out := fast(ids[:, :1])).past_key_values
    later = [fast(ids[:, i : i + 1], past_key_values=cache).logits for i in range(1, 3)]
    logits = torch.cat([out.logits, *later], 1)
    with torch.no_grad():
        assert_close("logits", logits, model(ids[:, :3]).logits, atol=1e-5)
