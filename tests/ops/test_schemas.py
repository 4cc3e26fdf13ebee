"""The text of each operator's schema against its implementation, the tuples of operands and the table of buffers."""

import inspect

import pytest
import torch

from kvpass.operands import (
    AppendBuffers,
    Attention,
    Entries,
    EvictBuffers,
    RecompressBuffers,
    RingBuffers,
    names_of,
    written_in,
)
from kvpass.ops import prompt_operators, schemas

OPERATORS = [
    name.removeprefix("kvpass::")
    for name in torch._C._dispatch_get_all_op_names()
    if name.startswith("kvpass::") and not name.endswith("_ranks")  # torch makes the schemas of these
]
SEVERAL = {side: [f"{side}_{name}" for name in Entries._fields] for side in ("pool", "tail")} | {
    "slots": ["slot_positions", "decode_state", "rule_rows"],
    "limits": ["quota", "next_position"],
    "observed": ["recompress_scores", "recompress_masses", "recompress_weights"],
    "window": ["recompress_window"],
}
"""Buffers of an operand that is not named as one."""
OF_CACHE = {  # what stands before and behind the buffers; what is written while policies of that sort decode
    "attend_cache": (Attention._fields, AppendBuffers, ("layer", "impl"), "append"),
    "attend_evict": (Attention._fields, EvictBuffers, ("layer", "policy", "impl", "ranks", "entering"), "evict"),
    "attend_ring": (Attention._fields, RingBuffers, ("columns", "seen", "layer", "first", "impl"), "append"),
    "observe_held": (("q", "value_dim", *Attention._fields[3:]), None, ("layer", "policy", "ranks"), "append"),
}


def arguments_of(operator):
    return getattr(torch.ops.kvpass, operator).default._schema.arguments


def test_an_implementation_takes_the_operands_of_its_schema():
    assert len(OPERATORS) == 23 and OF_CACHE.keys() <= set(OPERATORS)
    for operator in OPERATORS:
        module = schemas if hasattr(schemas, operator) else prompt_operators
        parameters = inspect.signature(getattr(module, operator)).parameters
        arguments = arguments_of(operator)
        assert [a.name for a in arguments] == list(parameters)
        defaults = [a.default_value if a.has_default_value() else inspect.Parameter.empty for a in arguments]
        assert defaults == [p.default for p in parameters.values()], operator
        assert len(arguments) <= 16


@pytest.mark.parametrize("operator", OF_CACHE)
def test_the_buffers_of_a_schema_are_those_of_the_table_and_it_writes_what_the_table_says(operator):
    before, buffers, behind, phase = OF_CACHE[operator]
    arguments = arguments_of(operator)
    names = [a.name for a in arguments]
    assert names[: len(before)] == list(before) and names[-len(behind) :] == list(behind)
    of_buffers = arguments[len(before) : -len(behind)]
    written = {b for a in of_buffers if a.alias_info and a.alias_info.is_write for b in SEVERAL.get(a.name, [a.name])}
    found = [b for a in of_buffers for b in SEVERAL.get(a.name, [a.name])]
    expected = set(names_of(buffers)) - {"row_index"} if buffers else {*found, *RecompressBuffers._fields}
    assert set(found) == expected and len(found) == len(expected)
    if buffers:
        assert written == written_in(phase) & expected
    else:
        assert written == written_in(phase) & set(RecompressBuffers._fields)
    aliases = [s for a in arguments if a.alias_info for s in a.alias_info.before_set]
    assert len(set(aliases)) == len(aliases)
