"""What tells one model from another: in this process the parameter itself, in a file what the model looks like."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from kvpass.errors import CacheMismatchError

SAMPLES = 256
"""Elements of each parameter that the digest of the weights looks at, evenly spaced."""

_IRRELEVANT = {
    *(
        "architectures",
        "dtype",
        "torch_dtype",
        "transformers_version",
        "use_cache",
        "return_dict",
        "id2label",
        "label2id",
    ),
    *("output_attentions", "output_hidden_states", "bos_token_id", "eos_token_id", "pad_token_id"),
}
"""Settings of a configuration that keys and values do not depend on, beside those whose name begins with ``_``."""


class Identity:
    """Which model filled a cache.

    Args:
        model: the decoder. Its parameters may change later; what is compared is always their present state.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.weights: Tensor = next(model.parameters())

    def describe(self) -> dict[str, Any]:
        """What is written beside a cache: class, dtype, configuration, digest of the weights; plain JSON."""
        config = getattr(self._model, "config", None)
        return {
            "class": type(self._model).__name__,
            "dtype": str(self.weights.dtype),
            "config": {} if config is None else dict(_settings(config.to_dict())),
            "weights": weights_digest(self._model),
        }

    def check(self, described: Mapping[str, Any]) -> None:
        """Hold this model against what :meth:`describe` said of the one that filled a cache.

        Settings of the configuration that only one of the two knows are not compared, so that a cache outlives a
        new version of transformers.

        Raises:
            CacheMismatchError: they differ; the message says in what.
        """
        own = self.describe()
        for name in ("class", "dtype"):
            if own[name] != described[name]:
                raise CacheMismatchError(
                    f"the cache is of a model of {name} {described[name]}, this one is {own[name]}"
                )
        ours, theirs = own["config"], described["config"]
        for name in sorted(ours.keys() & theirs.keys()):
            if ours[name] != theirs[name]:
                raise CacheMismatchError(
                    f"the cache is of another model: its config.{name} is {theirs[name]}, here it is {ours[name]}"
                )
        if own["weights"] != described["weights"]:
            raise CacheMismatchError("the cache is of another model: one of the same configuration with other weights")


Owner: TypeAlias = Identity | Tensor | tuple[str, ...]
"""By what a model is known in this process: its identity, a parameter, or the paths of its sites when it has none."""


def reference(owner: Owner) -> Callable[[], Tensor | tuple[str, ...] | None]:
    """What owners are compared by, not kept alive: None once it is gone."""
    known = owner.weights if isinstance(owner, Identity) else owner
    return weakref.ref(known) if isinstance(known, Tensor) else lambda: known


def weights_digest(model: nn.Module) -> str:
    """SHA-256 over name, shape, dtype and about ``SAMPLES`` evenly spaced elements of each parameter."""
    found = hashlib.sha256()
    for name, tensor in model.named_parameters():
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(flat.numel() // SAMPLES, 1)].contiguous().cpu()
        found.update(f"{name} {list(tensor.shape)} {tensor.dtype}\n".encode())
        found.update(sample.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _settings(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Settings that matter, nested ones with dotted names, their values as text."""
    for name, value in config.items():
        if str(name).startswith("_") or name in _IRRELEVANT:
            continue
        if isinstance(value, Mapping):
            yield from _settings(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", repr(value)
