"""Compile a module of one's own: torch.compile with backend="kvpass".

Prints::

    300 tokens of prompt, 8 new; entries kept per head: [[...]]
"""

import torch
from torch import nn

import kvpass


class Decoder(nn.Module):
    """One layer; kvpass.attention tells kvpass where the attention is."""

    def __init__(self, vocabulary: int = 64, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(2048, width)
        self.qkv, self.head = nn.Linear(width, 3 * width), nn.Linear(width, vocabulary)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(positions)
        q, k, v = self.qkv(x).unflatten(-1, (3 * self.heads, -1)).transpose(1, 2).chunk(3, 1)
        return self.head(x + kvpass.attention(q, k, v).transpose(1, 2).flatten(2))


torch.manual_seed(0)
options = {"policy": "lava", "budget": 64}
compiled = torch.compile(Decoder().eval(), backend="kvpass", options=options, fullgraph=True, dynamic=True)
ids = torch.randint(64, (1, 300))
out = ids
with torch.no_grad(), kvpass.session() as session:  # kvpass.generate is this loop
    for step in range(8):
        new = out if step == 0 else out[:, -1:]
        positions = torch.arange(out.shape[1] - new.shape[1], out.shape[1])[None]
        out = torch.cat([out, compiled(new, positions)[:, -1:].argmax(-1)], 1)
print(f"{ids.shape[1]} tokens of prompt, {step + 1} new; entries kept per head: {session.cache.lengths[0].tolist()}")
