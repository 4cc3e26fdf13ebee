"""Raw attention calls become canonical sites, or the capture is refused with module path, node and reason."""

import math
import re

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kvpass.errors import UnsupportedAttentionError
from kvpass.graphs.canonical import SITE, find_sites
from kvpass.graphs.find.sdpa import find_attention_pass, is_raw_attention

sdpa = F.scaled_dot_product_attention


def mask_of(q: Tensor) -> Tensor:
    return torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()


FORMS = {
    "keywords": lambda m, q, k, v, p: sdpa(query=q, key=k, value=v, is_causal=True, enable_gqa=True),
    "positional": lambda m, q, k, v, p: sdpa(q, k, v, None, 0.0, True, scale=None, enable_gqa=True),
    "scaled": lambda m, q, k, v, p: sdpa(q, k, v, is_causal=True, scale=0.25, enable_gqa=True),
    "masked": lambda m, q, k, v, p: sdpa(q, k, v, attn_mask=mask_of(q), enable_gqa=True),
    "positional mask": lambda m, q, k, v, p: sdpa(q, k, v, mask_of(q)[None, None], 0.0, False, enable_gqa=True),
    "aten": lambda m, q, k, v, p: torch.ops.aten.scaled_dot_product_attention(
        q, k, v, None, 0.0, True, enable_gqa=True
    ),
}


def test_each_form_of_the_call_becomes_a_site_with_the_same_output(decoder, capture, inputs):
    model = decoder(layers=len(FORMS))
    for layer, form in zip(model.layers, FORMS.values(), strict=True):
        layer.attend = form
    gm, (_, _, found, *_) = capture(model, inputs())
    assert found == len(FORMS)
    assert not any(is_raw_attention(node) for node in gm.graph.nodes)
    sites = find_sites(gm)
    assert [site.layer for site in sites] == [*range(found)]
    assert [site.scale for site in sites] == [0.25 if form == "scaled" else 8**-0.5 for form in FORMS]
    assert [site.module_path.split(".")[-2:] for site in sites] == [["layers", str(i)] for i in range(found)]
    assert {site.sliding_window for site in sites} == {None}
    assert all(site.k.meta["example_value"].shape[1] == 2 for site in sites)


def test_one_batch_row_or_a_fixed_length_without_numbers_in_the_mask_is_enough(decoder, capture, inputs):
    capture(decoder(FORMS["masked"], layers=1), inputs(batch=1))
    capture(decoder(FORMS["masked"], layers=1), inputs(), [find_attention_pass], dynamic=False)


def test_one_token_attends_causally_without_a_mask(decoder, capture, inputs):
    plain = decoder(lambda m, q, k, v, p: sdpa(q, k, v, enable_gqa=True))
    _, (_, _, found, *_) = capture(plain, inputs(tokens=1), dynamic=False)
    assert found == 2


def test_a_graph_without_attention_is_left_alone(capture, inputs):
    _, counts = capture(lambda ids, positions: (ids + positions).float(), inputs(), [find_attention_pass])
    assert counts == [0]


def test_the_graph_of_the_mask_is_gone_and_in_place_writes_to_what_lives_on_are_kept(decoder, capture, inputs):
    def attend(m, q, k, v, p) -> Tensor:
        mask = torch.zeros(q.shape[2], q.shape[2])
        mask[torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)] = -torch.inf
        q[..., :3].mul_(2.0)
        v.add_(1.0)
        return sdpa(q, k, v, attn_mask=mask, enable_gqa=True)

    gm, _ = capture(decoder(attend, layers=1), inputs())
    names = {str(node.target) for node in gm.graph.nodes}
    assert not any(word in name for name in names for word in ("ones", "zeros", "triu", "setitem"))
    assert {"mul_", "add_"} <= names


REFUSED = {
    "no mask and is_causal=False": lambda m, q, k, v, p: sdpa(q, k, v, enable_gqa=True),
    "dropout_p=0.5": lambda m, q, k, v, p: sdpa(q, k, v, dropout_p=0.5, is_causal=True, enable_gqa=True),
    "depends on a size or a number that the call gives": lambda m, q, k, v, p: sdpa(
        q, k, v, is_causal=True, scale=1 / math.sqrt(q.shape[2]), enable_gqa=True
    ),
    "a decoder with a cache of its own": lambda m, q, k, v, p: sdpa(
        q, torch.cat([k, k], 2), torch.cat([v, v], 2), is_causal=True, enable_gqa=True
    ),
    r"\[batch, heads, tokens, head_dim\] is needed": lambda m, q, k, v, p: sdpa(
        q[:, 0], k[:, 0], v[:, 0], is_causal=True
    )[:, None].expand(-1, 4, -1, -1),
}


def test_what_is_not_causal_self_attention_is_refused(decoder, capture_each, inputs):
    models = [decoder(form, layers=1) for form in REFUSED.values()]
    found = capture_each(
        [lambda *given, model=model: model(*given) for model in models], inputs(), [find_attention_pass]
    )
    for reason, refusal in zip(REFUSED, found, strict=True):
        assert re.search(reason, str(refusal)) and refusal.module_path.endswith("layers.0"), f"{reason}: {refusal}"
        assert refusal.node.startswith(("scaled_dot_product_attention", "out"))


def test_sites_and_raw_calls_in_one_graph_are_refused(decoder, capture, inputs):
    def attend(m, q, k, v, p) -> Tensor:
        return SITE(q, k, v, 0.5, 0) + sdpa(q, k, v, is_causal=True, enable_gqa=True)

    with pytest.raises(UnsupportedAttentionError, match="goes through the attention interface"):
        capture(decoder(attend), inputs(), [find_attention_pass])
