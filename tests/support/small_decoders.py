"""A decoder that knows nothing of transformers or kvpass, for tests of the raw backend."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from tiny_models import raw

VOCABULARY, HEADS, DIM = 128, 4, 8
WIDTH = HEADS * DIM


@torch.no_grad()
def recomputed(decoder: nn.Module, ids: Tensor, new: int) -> Tensor:
    """Ids ``[B, T + new]``: the best tokens, for each of which the whole text is computed again."""
    for _ in range(new):
        ids = torch.cat([ids, decoder(ids)[:, -1:].argmax(-1)], 1)
    return ids


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

    def turned(self, x: Tensor, positions: Tensor | None) -> Tensor:
        """Queries or keys ``[B, heads, T, DIM]`` as attention takes them, at positions ``[B, T]``."""
        return x

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """Attention output of a layer, ``[B, HEADS, T, DIM]``."""
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    def of_attention(self, x: Tensor, positions: Tensor | None, i: int) -> Tensor:
        """Attention output of a layer that ``x`` enters, ``[B, T, WIDTH]``."""
        b, t, _ = x.shape
        q, k, v = (part.view(b, t, -1, DIM).transpose(1, 2) for part in self.layers[i](x).split(self.sizes, -1))
        y = self.attend(self.turned(q, positions), self.turned(k, positions), v, i)
        return y.transpose(1, 2).reshape(b, t, WIDTH)

    def layer(self, x: Tensor, positions: Tensor | None, i: int) -> Tensor:
        """What leaves a layer that ``x`` enters, ``[B, T, WIDTH]``."""
        return x + self.of_attention(x, positions, i)

    def forward(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        x = self.embedded(ids, positions)
        for i in range(len(self.layers)):
            x = self.layer(x, positions, i)
        return self.head(x)


def raw_decoder(**options: Any) -> tuple[SmallDecoder, Any]:
    """A decoder, and what the raw backend compiles of it."""
    module = SmallDecoder(longest=128)
    return module, raw(module, {"policy": "lava", "budget": 24, "window": 8, "compiler": "eager", **options})
