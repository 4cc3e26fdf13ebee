"""Fingerprints that match caches to models: exact within a process, by samples of the weights in a file.

A cache holds keys and values, so it belongs to the weights that made them: parameters, persistent buffers (parts of a
checkpoint, such as a router's correction bias or quantised weights) and the active adapters of PEFT.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from kvpass.cache.model_state import Global, ModelState
from kvpass.errors import CacheMismatchError
from kvpass.policies.base import Policy
from kvpass.torch_compat import is_traceable_wrapper_subclass, wrapped_tensors

SAMPLES = 256
"""Evenly spaced elements of each tensor that the digest of the weights reads."""

_IRRELEVANT = set(
    "architectures dtype torch_dtype transformers_version use_cache return_dict id2label label2id output_attentions "
    "output_hidden_states bos_token_id eos_token_id pad_token_id gguf_file".split()
)
"""Settings of a configuration that do not affect keys and values; those named ``_...`` do not either."""

_VERSION = attrgetter("_version")


_NAMES: frozenset[str | Global] = frozenset(
    "_parameters _buffers _modules _forward_hooks _forward_pre_hooks "
    "_active_adapter _disable_adapters merged_adapters scaling".split()
)
"""Attributes by which a model leads to its modules, tensors and hooks, and those of PEFT's layers."""


class _Seen(NamedTuple):
    """A model when it was looked at."""

    attributes: ModelState
    ids: tuple[int, ...]  # of the tensors of the checkpoint
    counted: tuple[Tensor, ...]  # those whose version counts writes: all that were not made in inference mode
    adapters: tuple[str, ...]


class ModelFingerprint:
    """Fingerprint of a model.

    Args:
        model: the decoder. It may change later; the present state is compared.
        whole: weights (DTensor) of which the model has the part of this process, by name. All processes must then call
            :meth:`describe` and :meth:`check` together.
    """

    def __init__(self, model: nn.Module, whole: Mapping[str, Any] | None = None) -> None:
        self._model = model
        self._whole = whole or {}
        self._names = _NAMES

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelFingerprint:
        return ModelFingerprint(copy.deepcopy(self._model, memo), self._whole)

    @property
    def weights(self) -> Tensor:
        """The first parameter, which represents the model where only one tensor can."""
        return next(self._model.parameters())

    @cached_property
    def seen(self) -> _Seen:
        """The model when :attr:`state` was last read; the same object until something is written to it."""
        attributes = ModelState(self._model, self._names)  # first: later writes to the rest are noticed too
        tensors = tuple(tensor for _, tensor in _checkpoint(self._model))
        return _Seen(
            attributes,
            tuple(map(id, tensors)),
            tuple(tensor for tensor in tensors if not tensor.is_inference()),
            tuple(_adapter_state(module) for module in self._model.modules() if _is_adapter(module)),
        )

    def attributes(self, names: frozenset[str | Global]) -> ModelState:
        """Return the present state of the attributes with these names, which a capture reads, and watch them."""
        if not names <= self._names:
            self._names |= names
            vars(self).pop("seen", None)
        return self.seen.attributes if self._names == names | _NAMES else ModelState(self._model, names | _NAMES)

    @property
    def state(self) -> tuple[Any, ...]:
        """State that a filled cache is compared with in every call: tensors, write counts, adapters.

        Torch does not count writes through ``tensor.data``, so they are not detected.
        """
        if not self.seen.attributes.holds():
            vars(self).pop("seen", None)
        seen = self.seen
        return seen.ids, sum(map(_VERSION, seen.counted)), seen.adapters

    def describe(self) -> dict[str, Any]:
        """Return the fingerprint for a file: class, dtype, config, adapters, digest of the weights; plain JSON."""
        config = getattr(self._model, "config", None)
        return {
            "class": type(self._model).__name__,
            "dtype": str(self.weights.dtype),
            "config": {} if config is None else dict(settings_of(config.to_dict())),
            "adapters": [
                f"{name}: {_adapter_state(layer)}" for name, layer in self._model.named_modules() if _is_adapter(layer)
            ],
            "weights": weights_digest(self._model, self._whole),
        }

    def check_policy(self, policy: Policy) -> None:
        """Raise ValueError if the policy's options are made for another model; all processes must call it together."""
        for part in policy.parts:
            wanted = part.made_for()
            if wanted is not None and wanted != weights_digest(self._model, self._whole, rounded=True):
                raise ValueError(
                    f"policy {part.name!r} was given a file that was made for another model, or for this one with "
                    "other weights: make one with 'kvpass calibrate'"
                )

    def check(self, described: Mapping[str, Any]) -> None:
        """Compare this model with the fingerprint that :meth:`describe` made.

        Settings of the configuration that only one of the two has are not compared, so that a cache stays valid with a
        new version of transformers.

        Raises:
            CacheMismatchError: they differ; the message says in what.
        """
        own = self.describe()
        for name, value in own.items():
            if type(described.get(name)) is not type(value):
                raise CacheMismatchError(f"the cache does not say of which {name} its model is, or not as kvpass does")
        compare({name: own[name] for name in ("class", "dtype")}, described)
        compare(own["config"], described["config"], "config.")
        if own["adapters"] != described["adapters"]:
            raise CacheMismatchError("the cache was filled with other active adapters than the model has now")
        if own["weights"] != described["weights"]:
            raise CacheMismatchError("the cache is of another model: one of the same configuration with other weights")


def compare(own: Mapping[str, str], described: Mapping[str, Any], prefix: str = "") -> None:
    """Raise CacheMismatchError for a value of a model that differs in the fingerprint of a file and is in both."""
    for name in sorted(own):
        if own[name] != described.get(name, own[name]):
            raise CacheMismatchError(
                f"the cache is of another model: its {prefix}{name} is {described[name]}, here it is {own[name]}"
            )


@dataclass(frozen=True)
class GraphFingerprint:
    """Fingerprint of a module of the raw backend; only the inputs of its graph are known."""

    weights: Tensor | tuple[str, ...]  # the first parameter, or the paths of the attention ops when there is none
    state: tuple[int, ...]  # write counts of the parameters

    @classmethod
    def of(cls, inputs: Sequence[Any], paths: tuple[str, ...]) -> GraphFingerprint:
        parameters = [value for value in inputs if isinstance(value, nn.Parameter)]
        counted = [tensor for tensor in parameters if not tensor.is_inference()]
        return cls(parameters[0] if parameters else paths, (sum(map(_VERSION, counted)),))


Fingerprint: TypeAlias = ModelFingerprint | GraphFingerprint
"""Fingerprint of a model in this process."""


def weights_digest(model: nn.Module, whole: Mapping[str, Any], *, rounded: bool = False) -> str:
    """Return SHA-256 over name, shape, dtype and about ``SAMPLES`` elements of each checkpoint tensor.

    Args:
        whole: weights of which the model has a part, by name; one at a time is gathered. rounded: of floating elements
            as bf16, so that the digest is the same in fp32 and in bf16.
    """
    found = hashlib.sha256()
    for name, tensor in _checkpoint(model):
        if name in whole:
            tensor = whole[name].full_tensor()
        tensor = tensor.detach()
        for stored in (tensor, *wrapped_tensors(tensor)):
            if is_traceable_wrapper_subclass(stored):
                continue  # its numbers are those of what it wraps
            flat = stored.reshape(-1)
            sample = flat[:: max(flat.numel() // SAMPLES, 1)].contiguous().cpu()
            sample = sample.bfloat16() if rounded and sample.is_floating_point() else sample
            found.update(f"{name} {list(stored.shape)} {sample.dtype}\n".encode())
            found.update(sample.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def settings_of(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield settings that matter, as text; nested ones have dotted names."""
    for name, value in config.items():
        if str(name).startswith("_") or name in _IRRELEVANT:
            continue
        if isinstance(value, Mapping):
            yield from settings_of(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", repr(value)


def _checkpoint(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and persistent buffers with their names, tied ones once."""
    yield from model.named_parameters()
    known: set[int] = set()
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set and id(buffer) not in known:
                known.add(id(buffer))
                yield f"{path}.{name}", buffer


def _is_adapter(module: nn.Module) -> bool:
    """Return whether a module is a layer of PEFT, by its properties: PEFT need not be installed."""
    return isinstance(getattr(type(module), "active_adapters", None), property)


def _adapter_state(layer: Any) -> str:
    return f"{layer.active_adapters} {layer.disable_adapters} {layer.merged_adapters} {getattr(layer, 'scaling', None)}"
