"""The same contracts on a CUDA device; skipped without one."""

from __future__ import annotations

import pytest
import torch

import kvpass
from kvpass.testing import assert_close, kept_columns, left_pad, random_ids, tiny_model

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_contract_1_identity_on_cuda(backend):
    model = tiny_model("llama").cuda()
    fast = kvpass.compile(model, budget=10**6, window=8, backend=backend)
    ids = random_ids(2, 61).cuda()
    with torch.no_grad():
        assert_close("logits", fast(ids).logits, model(ids).logits, atol=1e-3)
    expected = model.generate(ids, max_new_tokens=12, do_sample=False)
    assert torch.equal(fast.generate(ids, max_new_tokens=12, do_sample=False), expected)


@pytest.mark.parametrize("policy", ["lava", "h2o"])
def test_cuda_keeps_what_the_cpu_keeps(policy):
    ids, mask = left_pad([random_ids(1, n, seed=n)[0] for n in (61, 37)])
    kept = []
    for device in ("cpu", "cuda"):
        model = tiny_model("llama").to(device)
        fast = kvpass.compile(model, policy=policy, budget=16, window=8, backend="eager")
        cache = fast(ids.to(device), attention_mask=mask.to(device)).past_key_values
        kept.append(kept_columns(cache, ids.shape[1]).cpu())
    assert torch.equal(*kept)
