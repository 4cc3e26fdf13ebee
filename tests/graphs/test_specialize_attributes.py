"""Float attributes become numbers under ``dynamic=True``, and another number another capture."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvpass.graphs.canonical import find_sites
from kvpass.graphs.find.sdpa import find_attention_pass
from kvpass.graphs.specialize_attributes import specialize_attributes_pass


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8, eps=0.01)
        self.drop = nn.Dropout(0.1)
        self.scale = 0.3

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.norm(x))[:, None]
        return F.scaled_dot_product_attention(y, y, y, is_causal=True, scale=self.scale)


def test_float_attributes_are_numbers_again_and_guarded() -> None:
    scales: list[float] = []

    def backend(gm, _):
        assert specialize_attributes_pass(gm) == 0
        copied = gm.graph.python_code("self").src
        assert "item" not in copied and "0.01" in copied
        find_attention_pass(gm)
        scales.extend(site.scale for site in find_sites(gm))
        gm.recompile()
        return gm.forward

    torch._dynamo.reset()
    module = Scaled().eval()
    fast = torch.compile(module, backend=backend, fullgraph=True, dynamic=True)
    x = torch.randn(2, 11, 8)
    with torch.no_grad():
        for module.scale in (0.3, 0.3, 0.7):
            torch.testing.assert_close(fast(x), module(x))
    assert scales == [0.3, 0.7]


def test_floats_made_from_sizes_are_no_reason_to_start_again(capture, inputs) -> None:
    _, counts = capture(lambda ids, positions: ids * positions.shape[1] ** 0.5, inputs(), [specialize_attributes_pass])
    assert counts == [0]
