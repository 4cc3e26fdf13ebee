"""Requests before the engine sees them, and the prompt of each row."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from kvpass.vllm.admission import DOCUMENT, PROTECT, Admission, Continued, Prompt, Rows
from kvpass.vllm.layout import BlockLayout, BlockSize
from kvpass.vllm.settings import Settings

CONFIGURED = {"policy": "lava", "budget": 64, "room": 8}
ADMISSION = Admission(Settings.read({"kvpass": CONFIGURED}), {"manual": [5, 6, 7], "tale": [8] * 90}, 100, begins={1})


def request(max_tokens, min_tokens=0, *, resumable=False, document=None, ids=3, first=9, **more):
    extra_args = None if document is None else {DOCUMENT: document, "other": 1}
    params = {"max_tokens": max_tokens, "min_tokens": min_tokens, "extra_args": extra_args, "prompt_logprobs": None}
    params = SimpleNamespace(**params | more)
    return SimpleNamespace(sampling_params=params, resumable=resumable, prompt_token_ids=[first, *[9] * (ids - 1)])


def test_an_answer_ends_where_its_room_does_and_without_settings_nothing_is_checked():
    for wanted, room in ((4000, 9), (10, 9), (9, 9), (3, 3)):
        ADMISSION.admit(asking := request(wanted))
        assert asking.sampling_params.max_tokens == room
    ADMISSION.admit(request(4000, 9))
    assert Admission.of(SimpleNamespace(additional_config={})) is None


def test_a_request_begins_with_the_document_that_it_names_and_its_question_takes_room():
    found = request(4000, document="manual")
    given = found.sampling_params.extra_args
    ADMISSION.admit(found)
    assert found.prompt_token_ids == [5, 6, 7, 9, 9, 9] and found.sampling_params.max_tokens == 9 - 3
    assert Continued.of(found.sampling_params) == ("manual", 3)
    assert given == {DOCUMENT: "manual", "other": 1}, "the caller's"


KNOWN = r": .* it knows \['kvpass_document', 'kvpass_protect'\]"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_tokens": 4000, "min_tokens": 10}, "min_tokens=10: kvpass keeps room for 9"),
        ({"max_tokens": 4000, "min_tokens": 7, "document": "manual"}, "min_tokens=7: kvpass keeps room for 6"),
        ({"resumable": True}, "streaming sessions"),
        ({"document": "manuel"}, r"kvpass_document='manuel': .* are \['manual', 'tale'\]"),
        ({"document": ["manual", 3]}, "the documents of this server are"),
        ({"document": 0}, "the documents of this server are"),
        ({"document": "manual", "ids": 9}, "a question of 9 tokens about document 'manual': kvpass keeps room for 8"),
        ({"document": "tale", "ids": 8, "max_model_len": 98}, "document 'tale' has 90 tokens and the question 8"),
        ({"document": "manual", "prompt_logprobs": 1}, "prompt_logprobs: document 'manual' is not read again"),
        (
            {"document": "manual", "first": 1},
            "a question about document 'manual' begins with the token of a new prompt",
        ),
        *(
            ({"extra_args": {DOCUMENT: "manual", name: 1}}, name + KNOWN)
            for name in ("kvpass_documents", "kvpass", "kvpass_budget")
        ),
        *(
            ({"extra_args": {PROTECT: first}}, re.escape(f"{PROTECT}={first!r}: must be an int from 0 to 3, "))
            for first in (-1, 4, 1.0, "1", True, [1])
        ),
        (
            {"extra_args": {PROTECT: 1, DOCUMENT: "manual"}},
            f"{PROTECT}=1: .* 0 to 0, .* about a document",
        ),
        (
            {"extra_args": {PROTECT: 33}, "ids": 90},
            "33 tokens .* the last 32, the window, and the budget is 64 entries for both: 65 are needed",
        ),
        ({"extra_args": {PROTECT: 97}, "ids": 97}, f"{PROTECT}=97: 65 tokens .* 97 are needed"),
    ],
)
def test_what_there_is_no_room_for_and_what_cannot_be_asked_of_a_document_is_refused(change, message):
    asking = request(**{"max_tokens": 4, **change})
    with pytest.raises(ValueError, match=message):
        replace(ADMISSION, max_model_len=change.get("max_model_len", 100)).admit(asking)


def test_a_prompt_that_is_not_about_a_document_may_begin_as_it_likes():
    ADMISSION.admit(asking := request(4, first=1))
    assert asking.prompt_token_ids == [1, 9, 9]


@pytest.mark.parametrize(("first", "ids"), [(0, 3), (3, 3), (32, 90), (64, 64), (None, 3)])
def test_what_a_request_protects_may_be_as_much_as_the_budget_holds_and_the_window_costs_nothing(first, ids):
    ADMISSION.admit(request(4, ids=ids, extra_args={PROTECT: first}))
    ADMISSION.admit(request(4, extra_args={PROTECT: 0, DOCUMENT: "manual"}))


def test_where_no_policy_is_given_each_request_must_name_a_document():
    settings = Settings.read({"kvpass": {"room": 8, "documents": ["manual=manual.kv"]}})
    admission = Admission(settings, ADMISSION.documents, 100)
    admission.admit(request(4, document="manual"))
    with pytest.raises(ValueError, match=r"kvpass_document=None: the documents of this server are \['manual"):
        admission.admit(request(4))


@pytest.fixture
def rows():
    found = Rows()
    found.layout = BlockLayout(layers=1, kv_heads=2, head_dim=8, pool=90, tail=40)
    return found


def test_rows_follow_the_batch(rows):
    prompts = [[1], [2, 2], [3, 3, 3]]
    params = [SimpleNamespace(extra_args=None, max_tokens=30) for _ in prompts]
    params[1].extra_args = {DOCUMENT: ["manual", 1]}
    rows.update([], [(row, params[row], prompt, []) for row, prompt in enumerate(prompts)], [])
    assert [rows[row].length for row in range(3)] == [1, 2, 3]
    assert [rows[row].size for row in range(3)] == [(1 + 32, 2), (32, 0), (1 + 32, 6)]
    rows.update([0], [], [(2, 0, False)])
    assert (rows[0].length, rows[1].length) == (3, 2)
    rows.update([], [], [(0, 1, True)])
    assert (rows[0].length, rows[1].length) == (2, 3)
    expected = [[1, 3, 0], [1, 0, 0], [32, 33, 40]]  # vLLM fills steps with rows that have no request
    assert rows.of_first(3).tolist() == expected
    with pytest.raises(KeyError):
        rows[2]


def test_a_request_has_a_number_of_its_own_below_the_most_that_run(rows):
    params = SimpleNamespace(extra_args=None, max_tokens=1)
    added = [(row, params, [1], []) for row in range(3)]
    rows.update([], added, [])
    rows.update([0], [], [(2, 0, False)])
    rows.update([], [added[1], added[2]], [])  # in place of the request in row 1, and behind it
    assert sorted(rows[row].number for row in range(3)) == [0, 1, 2] and rows[0].number == 2
    assert rows.added == [1, 2]
    rows.update([], [], [(1, 0, True)])
    assert rows.added == []
    rows.update([1], [(3, *added[0][1:])], [(3, 1, False)])
    assert rows.added == [1]


def test_a_request_that_comes_back_with_a_part_of_its_answer_is_known_and_prompts_are_told_apart(rows):
    params = SimpleNamespace(extra_args=None, max_tokens=4)
    rows.update([], [(0, params, [1], []), (1, params, [2], [3])], [])
    assert [rows[row].resumed for row in range(2)] == [False, True]
    first, same, other = (Prompt.of(ids, BlockSize(1, 2), 0) for ids in ([1, 2], [1, 2], [2, 1]))
    assert first == same != other
    params.extra_args = {PROTECT: 2}
    rows.update([], [(0, params, [1, 2], [])], [])
    assert rows[0].protected == 2 and rows[0].digest != first.digest, "what a prompt keeps depends on both"
