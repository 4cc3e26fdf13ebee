"""Rows of a step: which read a prompt, and which go on."""

from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

from kvpass.vllm.admission import DOCUMENT, Rows
from kvpass.vllm.layout import BlockLayout
from kvpass.vllm.settings import Settings
from kvpass.vllm.steps import Going, read_step


def given(new, lengths, documents=None, max_tokens=(20,) * 9, prompts=None):
    """Give rows, of which each has all tokens of its prompt before this step, or in it.

    Args:
        documents: tokens of the document that a row continues. max_tokens: of each row's answer. prompts: tokens of
            other prompts.
    """
    rows, continued = Rows(), {row: ("a", tokens) for row, tokens in (documents or {}).items()}
    read = [length - some or length for some, length in zip(new, lengths, strict=True)]
    prompts = dict(enumerate(read)) | (prompts or {})
    rows.layout = BlockLayout(layers=1, kv_heads=1, head_dim=8, pool=9, tail=24)  # 23 to append, and a first token
    of_rows = zip(range(len(lengths)), max_tokens, strict=False)
    params = [SimpleNamespace(extra_args={DOCUMENT: continued.get(row)}, max_tokens=most) for row, most in of_rows]
    rows.update([], [(row, params[row], [row] * length, []) for row, length in prompts.items()], [])
    return torch.tensor([0, *new]).cumsum(0), torch.tensor(lengths), rows


def read(new, lengths, blocks, *, shortest=2, **more):
    """Read a step of rows as ``given`` gives them, which have these blocks."""
    starts, lengths, rows = given(new, lengths, **more)
    return read_step(starts, lengths, (starts.int(), lengths.int(), torch.tensor(blocks).int()), rows, shortest)


def plain(going: list[Going]) -> list[tuple[list[int], list[int], list[int], int, bool]]:
    lists = [[x.tolist() for x in (each.tokens, each.block, each.length)] for each in going]
    return [(*found, each.tail, each.of_documents) for found, each in zip(lists, going, strict=True)]


def test_rows_that_begin_and_rows_that_go_on_are_told_apart():
    step = read([1, 5, 1, 1, 0], [9, 5, 1, 30, 4], [7, 3, 2, 5, 4])
    assert [(row.tokens, row.block, row.prompt.length) for row in step.prompts] == [(slice(1, 6), 3, 5)]
    assert plain(step.going) == [([0, 6, 7], [7, 2, 5], [9, 1, 30], 24, False)]
    assert step.empty.tolist() == [2], "a prompt of one token is appended to nothing"


def test_where_no_row_begins_row_and_token_are_the_same():
    step = read([1, 1, 1, 0, 0], [9, 1, 30, 0, 0], [7, 2, 5, 0, 0])
    [going] = step.going
    assert (step.prompts, going.tokens, step.empty.tolist()) == ([], slice(5), [2])
    assert (going.block.tolist(), going.length.tolist()) == ([7, 2, 5, 0, 0], [9, 1, 30, 0, 0])


def test_rows_whose_tails_have_other_sizes_go_on_apart_and_a_token_behind_a_prompt_in_chunks_goes_on():
    step = read([1, 1, 1, 1], [9, 40, 1, 30], [7, 3, 2, 5], max_tokens=(20, 2, 9, 24))
    assert plain(step.going) == [([1, 2], [3, 2], [40, 1], 9, False), ([0, 3], [7, 5], [9, 30], 24, False)]
    assert step.empty.tolist() == [2]
    step = read([1, 1], [9, 101], [7, 3], prompts={1: 100})
    [going] = step.going
    assert not step.prompts and going.block.tolist() == [7, 3] and not len(step.empty)


def test_a_question_begins_behind_its_document_also_if_it_is_one_token():
    step = read([1, 4, 1], [9, 104, 101], [7, 3, 2], documents={1: 100, 2: 100})
    assert [(row.tokens, row.block, row.prompt.document) for row in step.prompts] == [
        (slice(1, 5), 3, ("a", 100)),
        (slice(5, 6), 2, ("a", 100)),
    ]
    assert plain(step.going) == [([0], [7], [9], 24, False)] and not len(step.empty)


def test_where_entries_are_codes_a_prompt_of_one_token_begins_too():
    step = read([1, 5, 1], [9, 5, 1], [7, 3, 2], shortest=1)
    assert [(row.block, row.prompt.length) for row in step.prompts] == [(3, 5), (2, 1)]
    assert plain(step.going) == [([0], [7], [9], 24, False)] and not len(step.empty)


@pytest.mark.parametrize("begins", [False, True])
def test_rows_that_continue_documents_go_on_apart_from_the_others(begins):
    new, lengths, blocks = [1, 1, 1, 1], [102, 9, 1, 130], [7, 3, 2, 5]
    more = ([6], [6], [8]) if begins else ([], [], [])
    step = read(*(a + b for a, b in zip((new, lengths, blocks), more, strict=True)), documents={0: 100, 3: 50})
    assert plain(step.going) == [([1, 2], [3, 2], [9, 1], 24, False), ([0, 3], [7, 5], [102, 130], 23, True)]
    assert len(step.prompts) == begins and step.empty.tolist() == [2]


@pytest.mark.parametrize(
    ("new", "length", "own", "appends", "waits"),
    [
        *((new, length, new, False, True) for new in (20, 1) for length in (new, 60, 100)),
        *((new, new, 100, False, False) for new in (100, 120)),
        (25, 120, 5, False, True),
        (9, 120, 0, True, False),
    ],
)
def test_chunks_of_a_prompt_of_100_tokens_and_its_answer(new, length, own, appends, waits):
    step = read([1, new], [9, length], [7, 3], prompts={1: 100})
    [row] = step.prompts
    assert (row.tokens, row.read, row.end) == (slice(1, 1 + new), length - new, length)
    assert (row.own, row.appends, row.waits) == (own, appends, waits)
    assert plain(step.going) == [([0], [7], [9], 24, False)] and not len(step.empty)


def test_a_question_may_come_in_chunks_behind_its_document_and_the_end_of_a_prompt_before_the_begin_of_another():
    step = read([4, 5, 1], [104, 109, 110], [7, 3, 2], documents={0: 100, 1: 100, 2: 100})
    found = [(row.block, row.read, row.own, row.appends) for row in step.prompts]
    assert found == [(7, 100, 0, True), (3, 104, 0, True)]
    assert plain(step.going) == [([9], [2], [110], 23, True)]
    step = read([8, 30], [8, 100], [7, 3], prompts={0: 50, 1: 100})
    assert [row.block for row in step.prompts] == [3, 7]


@pytest.mark.parametrize("new", [[1, 1], [1, 6]])
def test_no_value_of_the_device_is_read_on_the_host(new):
    starts, lengths, rows = given(new, [9, 6])
    on_device = tuple(torch.empty(n, dtype=torch.int32, device="meta") for n in (3, 2, 2))
    step = read_step(starts, lengths, on_device, rows)
    assert len(step.prompts) == new.count(6)
    [going] = step.going
    assert going.block.is_meta and going.block.shape == (2 - len(step.prompts),)


@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM: make test-vllm")
@pytest.mark.parametrize(("new", "lengths"), [([1, 1], [9, 1]), ([1, 6], [9, 6])])
def test_the_builder_reads_no_value_of_the_device_on_the_host(new, lengths):
    from kvpass.vllm.backend import KVPassBuilder

    device = torch.device("meta")
    layers = {name: SimpleNamespace(kv_cache=torch.empty(5, device=device)) for name in "ab"}
    config = SimpleNamespace(
        additional_config={"kvpass": {"policy": "lava", "budget": 40, "room": 8}},
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        model_config=SimpleNamespace(max_model_len=100, get_num_layers=lambda parallel: len(layers)),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        compilation_config=SimpleNamespace(cudagraph_mode=None, static_forward_context=layers),
    )
    starts, lengths, Rows.latest = given(new, lengths)
    layout = Settings.read(config.additional_config).layout(len(layers), kv_heads=2, head_dim=8)
    builder = KVPassBuilder(SimpleNamespace(layout=layout), list(layers), config, device)
    common = SimpleNamespace(
        num_reqs=2,
        query_start_loc_cpu=starts,
        seq_lens_cpu_upper_bound=lengths,
        query_start_loc=starts.to(device),
        seq_lens=lengths.to(device),
        block_table_tensor=torch.empty(2, 1, dtype=torch.int32, device=device),
    )
    found = builder.build(0, common)
    [going] = found.step.going
    assert going.block.is_meta and going.block.shape == (new.count(1),)
    assert found.tables.used.is_meta and found.tables.offsets.shape == (5, 2 * 2 + 1)
