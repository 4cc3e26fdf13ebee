"""Compare what policies keep of given queries, keys and values: no model needed.

Prints::

    snapkv          [[192, 192], [192, 192]] of 1000 tokens, 100 % as snapkv
    ada_snapkv      [[..., ...], [..., ...]] of 1000 tokens, ... % as snapkv
    lava            [[..., ...], [..., ...]] of 1000 tokens, ... % as snapkv
    pyramidkv       [[..., ...], [..., ...]] of 1000 tokens, ... % as snapkv
    streaming_llm   [[192, 192], [192, 192]] of 1000 tokens, ... % as snapkv
"""

import torch

import kvpass

torch.manual_seed(0)
layers, batch, query_heads, kv_heads, tokens, dim, window = 2, 1, 4, 2, 1000, 32, 32
queries = torch.randn(layers, batch, query_heads, window, dim)
keys = torch.randn(layers, batch, kv_heads, tokens, dim) * torch.tensor([1.0, 3.0])[:, None, None]  # head 1 is peaked
values = torch.randn(layers, batch, kv_heads, tokens, dim)

reference = None
for policy in ("snapkv", "ada_snapkv", "lava", "pyramidkv", "streaming_llm"):
    found = kvpass.plan(policy, queries, keys, values, budget=192)
    reference = found.keep if reference is None else reference
    shared = (found.keep & reference).sum() / found.keep.sum()
    print(f"{policy:15} {found.lengths[:, 0].tolist()} of {tokens} tokens, {shared:.0%} as snapkv".replace("%", " %"))
