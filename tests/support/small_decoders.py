"""A decoder that knows nothing of transformers or kvpass, for tests of the raw backend."""

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

VOCABULARY, WIDTH, HEADS = 128, 32, 4


class OneLayer(nn.Module):
    """Embeddings of tokens and positions, one layer of causal attention, a head; what a test changes is a method.

    Args:
        longest: rows of the table of positions. wide: a factor of the weights, by which attention is far from uniform.
    """

    def __init__(self, longest: int = 96, wide: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(longest, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, 3 * WIDTH)])
        self.head = nn.Linear(WIDTH, VOCABULARY)
        for parameter in self.parameters():
            parameter.data.mul_(wide)
        self.eval()

    def positions(self, ids: Tensor) -> Tensor:
        """What is added to the embeddings of ids that come without positions, ``[T, WIDTH]``."""
        return self.places(torch.arange(ids.shape[1]))

    def embedded(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """What enters the layer, ``[B, T, WIDTH]``."""
        return self.embed(ids) + (self.positions(ids) if positions is None else self.places(positions))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """Attention output of the layer, of ``[B, HEADS, T, WIDTH / HEADS]``."""
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        b, t = ids.shape
        x = self.embedded(ids, positions)
        for i, layer in enumerate(self.layers):
            q, k, v = (part.view(b, t, HEADS, -1).transpose(1, 2) for part in layer(x).chunk(3, -1))
            x = x + self.attend(q, k, v, i).transpose(1, 2).reshape(b, t, WIDTH)
        return self.head(x)
