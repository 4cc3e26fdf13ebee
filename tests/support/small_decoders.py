"""A decoder that knows nothing of transformers or kvpass, for tests of the raw backend."""

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

VOCABULARY, HEADS, DIM = 128, 4, 8
WIDTH = HEADS * DIM


class SmallDecoder(nn.Module):
    """Embeddings of tokens and positions, layers of causal attention, a head; what a test changes is a method.

    Args:
        longest: rows of the table of positions. wide: a factor of the weights, by which attention is far from uniform.
    """

    def __init__(self, longest: int = 96, wide: float = 1.0, layers: int = 1, kv_heads: int = HEADS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.sizes = [WIDTH, kv_heads * DIM, kv_heads * DIM]
        self.embed, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(longest, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, sum(self.sizes)) for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        for parameter in self.parameters():
            parameter.data.mul_(wide)
        self.eval()

    def positions(self, ids: Tensor) -> Tensor:
        """What is added to the embeddings of ids that come without positions, ``[T, WIDTH]``."""
        return self.places(torch.arange(ids.shape[1]))

    def embedded(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """What enters the first layer, ``[B, T, WIDTH]``."""
        return self.embed(ids) + (self.positions(ids) if positions is None else self.places(positions))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """Attention output of a layer, ``[B, HEADS, T, DIM]``."""
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        b, t = ids.shape
        x = self.embedded(ids, positions)
        for i, layer in enumerate(self.layers):
            q, k, v = (part.view(b, t, -1, DIM).transpose(1, 2) for part in layer(x).split(self.sizes, -1))
            x = x + self.attend(q, k, v, i).transpose(1, 2).reshape(b, t, WIDTH)
        return self.head(x)
