"""Requests before the engine sees them, and the prompt of each row."""

from types import SimpleNamespace

import pytest

from kvpass.vllm.admission import Prompt, Rows, admit, check_beams

CONFIGURED = {"kvpass": {"policy": "lava", "budget": 64, "room": 8}}


def request(max_tokens: int, min_tokens: int = 0, *, resumable: bool = False) -> SimpleNamespace:
    params = SimpleNamespace(max_tokens=max_tokens, min_tokens=min_tokens)
    return SimpleNamespace(sampling_params=params, resumable=resumable)


@pytest.mark.parametrize(("asked", "given"), [(4000, 9), (10, 9), (9, 9), (3, 3)])
def test_an_answer_ends_where_its_room_does(asked, given):
    assert admit(CONFIGURED, request(asked)).sampling_params.max_tokens == given


def test_without_settings_a_request_is_not_changed():
    assert admit({}, request(4000, 3000, resumable=True)).sampling_params.max_tokens == 4000


def test_more_tokens_than_there_is_room_for_cannot_be_demanded():
    admit(CONFIGURED, request(4000, 9))
    with pytest.raises(ValueError, match="min_tokens=10: kvpass keeps room for 9"):
        admit(CONFIGURED, request(4000, 10))


def test_streaming_sessions_are_refused():
    with pytest.raises(ValueError, match="streaming sessions"):
        admit(CONFIGURED, request(4, resumable=True))


def test_beam_search_is_refused():
    check_beams({})
    with pytest.raises(ValueError, match="beam search"):
        check_beams(CONFIGURED)


def test_rows_follow_the_batch():
    rows, prompts = Rows(), [[1], [2, 2], [3, 3, 3]]
    rows.update([], [(row, None, prompt, []) for row, prompt in enumerate(prompts)], [])
    assert [rows[row].length for row in range(3)] == [1, 2, 3]
    rows.update([0], [], [(2, 0, False)])
    assert (rows[0].length, rows[1].length) == (3, 2)
    rows.update([], [], [(0, 1, True)])
    assert (rows[0].length, rows[1].length) == (2, 3)
    with pytest.raises(KeyError):
        rows[2]


def test_a_digest_tells_prompts_apart():
    assert Prompt.of([1, 2]) == Prompt.of([1, 2]) != Prompt.of([2, 1])
