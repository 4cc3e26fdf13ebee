"""``kvpass.calibrate``: fits what enters attention to the log of KVzip+'s scores (KVzap, arXiv 2601.07891).

Each text runs once, as ``[header, text; request to repeat it, text]`` in the model's chat template. In each layer, y is
the log of the score of :class:`kvpass.policies.kvzip.KVzipPlus`: the most attention that the repetition pays an entry,
weighed by norms. Only sums over tokens of ``x x'`` and ``x y'`` are held, in fp64.
"""

from __future__ import annotations

import hashlib
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from kvpass.cache.fingerprint import weights_digest
from kvpass.calibration.texts import generated_texts
from kvpass.frontends.arguments import check_model
from kvpass.frontends.attention import kvpass_attention
from kvpass.frontends.transformers import CompressedModel
from kvpass.operands import Attention
from kvpass.policies.kvzap import MODEL, SHARES
from kvpass.policies.observation import projected_norms
from kvpass.policies.options import check_float, check_int
from kvpass.policies.replay import Replayed, most_attended
from kvpass.progress import progress_bar, progress_console
from kvpass.replace_file import replacing

_NAME = "kvpass_calibration"
_TEXTS = "kvpass_texts"
_REQUEST = "\n\nRepeat the previous context exactly."
_MARK = "\ufffckvpass text\ufffc"
_SKIPPED = 4
"""First tokens, which attention pays whatever they say."""
_LEAST = 1e-12
"""Least score of which the log is taken."""
_HELD_OUT = 4
"""Of so many pieces of text one is not fitted, but tells R2."""
_PLANNED = 0.25
"""Part of the entries that KVzip+ keeps where shares of heads are counted."""


@dataclass(frozen=True)
class Calibration:
    """Maps fitted for a model: what :func:`calibrate` returns, to be saved for ``weights`` of policy ``kvzap``.

    Attributes:
        weight: ``[L, K, hidden]``, layers under the budget. bias: ``[L, K]``. head_shares: of the entries that KVzip+
            keeps at a quarter, the part of each head, mean over the fitted texts, ``[L, K]``. r2: share of the variance
            that is explained in texts that were held out, ``[L, K]``. model, texts: digests. fitted: tokens.
    """

    weight: Tensor
    bias: Tensor
    head_shares: Tensor
    r2: Tensor
    model: str
    texts: str
    fitted: int

    def save(self, path: str | Path) -> None:
        """Write a safetensors file, whose maps have the names of NVIDIA's files."""
        tensors = {SHARES: self.head_shares, "r2": self.r2}
        for layer, (weight, bias) in enumerate(zip(self.weight, self.bias, strict=True)):
            tensors |= {f"module_list.{layer}.weight": weight, f"module_list.{layer}.bias": bias}
        told = {MODEL: self.model, _TEXTS: self.texts, "fitted_tokens": str(self.fitted)}
        save_file({name: x.float().contiguous().cpu() for name, x in tensors.items()}, path, metadata=told)


def calibrate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    texts: Sequence[str] | None = None,
    tokens: int = 1000,
    ridge: float = 30.0,
    resume: str | Path | None = None,
) -> Calibration:
    """Fit the maps of policy ``kvzap`` for a model: ``kvpass.calibrate(model, tokenizer).save("kvzap.safetensors")``.

    Each piece of text runs through the model once, twice its length. The model does not change.

    Args:
        model: a decoder of transformers, in eval mode, not compiled by kvpass.
        texts: what to fit on, as mixed as what will be compressed; None: generated ones. Eight pieces or more.
        tokens: of a piece; longer texts are cut into several. Scores depend on it: about the length to be compressed.
        ridge: added to the diagonal of ``x x'``, summed over tokens.
        resume: file that Ctrl-C leaves, from which the next call with the same model and texts goes on, and which is
            removed at the end.
    Raises:
        ValueError: an argument is out of range, too little text, or a model whose attention layers are not called
            through transformers' interface.
    """
    if isinstance(model, CompressedModel):
        raise ValueError(f"{type(model).__name__} is compiled by kvpass; calibrate the original model")
    check_model(model)
    check_int("tokens", tokens, 32)
    check_float("ridge", ridge, 0.0, open_low=True)
    if not type(model)._can_set_attn_implementation():
        raise ValueError(f"{type(model).__name__} does not call attention through transformers' interface")
    pieces = _pieces(tokenizer, generated_texts() if texts is None else texts, tokens)
    held_out = pieces[_HELD_OUT - 1 :: _HELD_OUT]
    fitted = [piece for number, piece in enumerate(pieces) if number % _HELD_OUT != _HELD_OUT - 1]
    if not held_out:
        raise ValueError(f"texts: {len(pieces)} pieces of {tokens} tokens; at least {_HELD_OUT} are needed")
    digests = {
        MODEL: weights_digest(model, {}, rounded=True),
        _TEXTS: hashlib.sha256(repr(pieces).encode()).hexdigest(),
    }
    of = digests | {"ridge": str(ridge)}
    seen = _Seen() if resume is None else _Seen.resumed(Path(resume), of, model.device)
    with _observed(model) as run, progress_bar(progress_console()) as progress:
        task = progress.add_task("calibrate", total=len(pieces), completed=seen.pieces)
        try:
            for piece in fitted[seen.pieces :]:
                layers = run(piece)
                with _counted_whole():
                    seen.fit(layers)
                progress.advance(task)
            maps = seen.solve(ridge)
            for piece in held_out[seen.pieces - len(fitted) :]:
                layers = run(piece)
                with _counted_whole():
                    seen.tell(layers, *maps)
                progress.advance(task)
        except KeyboardInterrupt:
            if resume is not None and seen.pieces:
                seen.save(Path(resume), of)
            raise
    if resume is not None:
        Path(resume).unlink(missing_ok=True)
    return Calibration(
        weight=maps[0],
        bias=maps[1],
        head_shares=torch.stack(seen.shares).mean(0),
        r2=seen.r2,
        model=digests[MODEL],
        texts=digests[_TEXTS],
        fitted=int(seen.sums[0][0, -1, -1]),
    )


class Piece(NamedTuple):
    """Token ids of a piece of text: what stands before it, itself, what asks to repeat it; then it comes again."""

    header: list[int]
    text: list[int]
    request: list[int]

    @property
    def first(self) -> int:
        """Tokens at the begin that are not fitted: what stands before the text, at least four."""
        return max(len(self.header), _SKIPPED)

    @property
    def prompt(self) -> list[int]:
        return self.header + self.text

    @property
    def replay(self) -> list[int]:
        return self.request + self.prompt[self.first :]


def _pieces(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], tokens: int) -> list[Piece]:
    """Return texts in pieces of so many tokens; what is left of a text, and shorter ones, from a quarter of it on."""
    if tokenizer.chat_template is None:
        bos = tokenizer.bos_token_id
        header, request = [] if bos is None else [bos], _ids(tokenizer, _REQUEST + "\n\n")
    else:
        asked = [{"role": "user", "content": _MARK + _REQUEST}]
        told = str(tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True))
        header, request = (_ids(tokenizer, part) for part in told.split(_MARK))
    found = []
    for text in texts:
        ids = _ids(tokenizer, text)
        parts = [ids[first : first + tokens] for first in range(0, len(ids), tokens)]
        found += [Piece(header, part, request) for part in parts if 4 * len(part) >= tokens]
    return found


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


class _Layer(NamedTuple):
    """Tokens of a text in one layer: what enters attention ``[N, hidden]``, log of the score ``[N, K]``; fp64."""

    x: Tensor
    y: Tensor


@dataclass
class _Seen:
    """What the pieces so far gave, with sums over tokens in each layer.

    Attributes:
        pieces: how many there were. shares: of heads, in each fitted piece. sums: over fitted pieces, of ``x x'`` and
            ``x y'`` where x ends with a 1, ``[L, hidden + 1, hidden + 1]`` and ``[L, hidden + 1, K]``. told: over
            held-out pieces, of ones, y, squares of y and squared errors, each ``[L, K]``.
    """

    pieces: int = 0
    shares: list[Tensor] = field(default_factory=list)
    sums: tuple[Tensor, ...] = ()
    told: tuple[Tensor, ...] = ()

    def fit(self, layers: Sequence[_Layer]) -> None:
        x, y = layers[0]
        columns, heads, zeros = x.shape[1] + 1, y.shape[1], x.new_zeros
        self.sums = self.sums or tuple(zeros(len(layers), columns, n) for n in (columns, heads))
        for layer, xx, xy in zip(layers, *self.sums, strict=True):
            x = nn.functional.pad(layer.x, (0, 1), value=1.0)
            xx.addmm_(x.T, x)
            xy.addmm_(x.T, layer.y)
        self.shares.append(_shares(torch.stack([layer.y for layer in layers])))
        self.pieces += 1

    def solve(self, ridge: float) -> tuple[Tensor, Tensor]:
        """Return weights ``[L, K, hidden]`` and biases ``[L, K]``; the biases are not penalised."""
        xx, _ = self.sums
        penalty = xx.new_full(xx.shape[1:2], ridge)
        penalty[-1] = 0
        solved = torch.stack([torch.linalg.solve(x + penalty.diag(), xy).T for x, xy in zip(*self.sums, strict=True)])
        return solved[..., :-1], solved[..., -1]

    def tell(self, layers: Sequence[_Layer], weights: Tensor, biases: Tensor) -> None:
        found = []
        for (x, y), weight, bias in zip(layers, weights, biases, strict=True):
            errors = y - (x @ weight.T + bias)
            found.append(torch.stack([torch.ones_like(y), y, y.square(), errors.square()]).sum(1))
        parts = torch.stack(found, 1).unbind()
        self.told = tuple(map(torch.add, self.told, parts)) if self.told else parts
        self.pieces += 1

    @property
    def r2(self) -> Tensor:
        """Share of the variance that is explained, ``[L, K]``."""
        count, y, yy, error = self.told
        return 1 - error / (yy - y.square() / count).clamp(min=1e-12)

    def save(self, path: Path, of: Mapping[str, str]) -> None:
        with replacing(path) as file:
            torch.save({"of": dict(of), **vars(self)}, file)

    @classmethod
    def resumed(cls, path: Path, of: Mapping[str, str], device: torch.device) -> _Seen:
        """Return what a file of :meth:`save` holds, or nothing if it is of another model, other texts or options."""
        held = torch.load(path, map_location=device, weights_only=True) if path.is_file() else {"of": None}
        return cls(**held) if held.pop("of") == of else cls()


@contextmanager
def _counted_whole() -> Iterator[None]:
    """Put off Ctrl-C until the block has ended, so that no sum lacks a part of a piece."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: asked.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if asked:
        raise KeyboardInterrupt


def _shares(y: Tensor) -> Tensor:
    """Return of the best quarter of all entries the part that is of each head, ``[L, K]``, from y ``[L, N, K]``."""
    count = max(int(_PLANNED * y.numel()), 1)
    best = torch.zeros(y.numel(), dtype=torch.float64, device=y.device)
    best[y.flatten().topk(count).indices] = 1
    return best.view(y.shape).sum(1) / count


class _Observer:
    """Sees attention calls of a model, what the linear layer before each reads, and the linear layer behind it.

    Attributes:
        piece: the text that runs. layers: what was found in it, of layers without a sliding window.
    """

    def __init__(self) -> None:
        self.piece: Piece | None = None
        self.layers: list[_Layer] = []
        self._read: Tensor | None = None
        self._waiting: tuple[Tensor, Attention] | None = None  # what entered; its output projection is still to come

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **given: Any
    ) -> tuple[Tensor, None]:
        """Attention of transformers' interface."""
        if given.get("sliding_window") is None:
            assert self._read is not None
            scale = given.get("scaling") or q.shape[-1] ** -0.5
            self._waiting = self._read, Attention(q, k, v, scale, given.get("softcap"), given.get("s_aux"))
        return kvpass_attention(module, q, k, v, mask, **given)

    def see(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Hook before a linear layer."""
        if self._waiting is not None:
            weight: Any = module.weight
            self.layers.append(self._observe(*self._waiting, weight.T if isinstance(module, Conv1D) else weight))
            self._waiting = None
        self._read = args[0]

    def _observe(self, x: Tensor, call: Attention, projection: Tensor) -> _Layer:
        assert self.piece is not None
        first, n = self.piece.first, len(self.piece.prompt)
        norms = torch.linalg.vector_norm(x[:, n:].float(), dim=-1)
        replay = Replayed(first, n, first, call.q[:, :, n:], call.k[:, :, n:], norms)
        worth = projected_norms(call.v[:, :, :n], projection, 2)
        most = most_attended(call.k[:, :, :n], [replay], *call[3:], value_norms=worth)
        return _Layer(x[0, first:n].double(), most[0, :, first:].T.double().clamp(min=_LEAST).log())


@contextmanager
def _observed(model: PreTrainedModel) -> Iterator[Any]:
    """Give a function that runs a piece of text and returns a :class:`_Layer` of each layer under the budget."""
    observer, before = _Observer(), model.config._attn_implementation
    AttentionInterface.register(_NAME, observer.attend)
    linear = [module for module in model.modules() if isinstance(module, nn.Linear | Conv1D)]
    hooks = [module.register_forward_pre_hook(observer.see) for module in linear]
    model.set_attn_implementation(_NAME)
    try:
        yield partial(_run, model, observer)
    finally:
        model.set_attn_implementation(before)
        for hook in hooks:
            hook.remove()


@torch.inference_mode()
def _run(model: PreTrainedModel, observer: _Observer, piece: Piece) -> list[_Layer]:
    observer.piece, observer.layers = piece, []
    model(torch.tensor([piece.prompt + piece.replay], device=model.device), use_cache=False, logits_to_keep=1)
    return observer.layers
