"""Checks of requests before the engine sees them, and the prompt of each row of a batch."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

from kvpass.vllm.settings import Settings


class Prompt(NamedTuple):
    """A prompt's length, without what was generated, and a digest of its tokens."""

    length: int
    digest: bytes

    @classmethod
    def of(cls, ids: Sequence[int]) -> Prompt:
        return cls(len(ids), hashlib.blake2b(array("q", ids).tobytes(), digest_size=16).digest())


class Rows:
    """The prompt of each row of a worker's batch; vLLM tells attention backends only of whole lengths.

    Attributes:
        latest: of the engine that is being built; its attention backend, made later, takes it from here.
    """

    latest: ClassVar[Rows]

    def __init__(self) -> None:
        self._prompts: dict[int, Prompt] = {}

    def __getitem__(self, row: int) -> Prompt:
        return self._prompts[row]

    def update(self, removed: Sequence[int], added: Sequence[Any], moved: Sequence[Any]) -> None:
        """Apply vLLM's changes of a batch, in its order.

        Args:
            added: (row, parameters, prompt, output) of new or resumed requests. moved: (from, to, whether swapped).
        """
        for row in removed:
            self._prompts.pop(row, None)
        for row, _, prompt, _ in added:
            self._prompts[row] = Prompt.of(prompt)
        for source, target, swapped in moved:
            prompt, other = self._prompts.pop(source, None), self._prompts.pop(target, None)
            if prompt is not None:
                self._prompts[target] = prompt
            if swapped and other is not None:
                self._prompts[source] = other


def admit(additional: object, request: Any) -> Any:
    """Return the request, ended with ``length`` when its room is used up.

    A block has room for a fixed number of tokens. Chat clients usually leave ``max_tokens`` out, so a larger number is
    not an error: the answer ends with ``finish_reason="length"``, as at the end of the context.

    Args:
        additional: vLLM's ``additional_config``. request: with its own copy of ``sampling_params``.
    Raises:
        ValueError: ``min_tokens`` is more than there is room for, or the request is a streaming session; HTTP 400.
    """
    settings = Settings.read(additional)
    if settings is None:
        return request
    most = settings.room + 1  # the last token is never appended
    params = request.sampling_params
    if request.resumable:
        raise ValueError("kvpass does not support streaming sessions: send the whole prompt in one request")
    if params.min_tokens > most:
        raise ValueError(f"min_tokens={params.min_tokens}: kvpass keeps room for {most} tokens; raise 'room'")
    params.max_tokens = min(params.max_tokens, most)
    return request


def check_beams(additional: object) -> None:
    """Refuse beam search: vLLM sends every token of every beam as a new prompt, answer included.

    Args:
        additional: vLLM's ``additional_config``.
    Raises:
        ValueError: kvpass is configured; HTTP 400.
    """
    if Settings.read(additional) is not None:
        raise ValueError("kvpass does not support beam search in vLLM, which reads the prompt anew for each token")
