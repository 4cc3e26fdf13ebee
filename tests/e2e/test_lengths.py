"""What a raw module makes of its length goes on as in one text, or is refused, on both sides of every number."""

import itertools
import math

import pytest
import torch
from torch.nn.functional import one_hot

import kvpass
from numeric_checks import assert_close
from pairwise import quick, quick_rows
from small_decoders import WIDTH, SmallDecoder
from tiny_models import in_session, random_ids, raw

END = 24
PROMPTS = (20, 40)  # before and behind the numbers of the modules below
TEXT = 60


class Decoder(SmallDecoder):
    """Embeddings, whatever a test does to them, one layer of attention and a head.

    Args:
        change: from the module, embeddings ``[B, T, WIDTH]`` and positions ``[B, T]`` to what enters the layer.
    """

    def __init__(self, change) -> None:
        super().__init__(longest=128)
        self.change = change
        self.register_buffer("frequencies", torch.rand(WIDTH))
        self.register_buffer("limit", torch.tensor(26.0))
        self.register_buffer("table", torch.randn(128, WIDTH))
        self.register_buffer("numbers", torch.arange(128)[None])
        self.attribute, self.short = torch.randn(2, 128, WIDTH), torch.nn.Embedding(END, WIDTH)

    def embedded(self, ids, positions):
        return self.change(self, self.embed(ids), positions)


def compiled(change):
    """A module, and what is captured of it."""
    module = Decoder(change)
    return module, raw(module, {"policy": "full", "compiler": "eager"})


def in_pieces(fast, ids, pieces):
    """Logits of a text given in pieces, and the cache of their session."""
    return in_session(fast, pieces, ids, torch.arange(ids.shape[1]).expand_as(ids))


@torch.no_grad()
def assert_as_whole(module, fast, ids, pieces):
    """A text given in pieces has the logits of the whole text; returns the cache of their session."""
    found, cache = in_pieces(fast, ids, pieces)
    assert_close("logits", found, module(ids, torch.arange(ids.shape[1]).expand_as(ids)), atol=1e-4)
    return cache


def order(x):
    return torch.arange(x.shape[1])


def mean(x):
    return x.mean(1, keepdim=True)


def added_in_place(x, rows):
    x = x.clone()
    x += rows
    return x


GOES_ON = {
    "segments": lambda m, x, p: x + m.places(order(x) // 32),
    "segments that are given": lambda m, x, p: x + m.places(p // 32),
    "scaling from a number on": lambda m, x, p: x * ((order(x) + 1).log() / math.log(26)).clamp(min=1)[:, None],
    "scaling that is given": lambda m, x, p: x * ((p + 1).log() / math.log(26)).clamp(min=1)[..., None],
    "another vector from a number on": lambda m, x, p: torch.where((order(x) >= 30)[:, None], 2 * x, x),
    "up to the limit": lambda m, x, p: x + order(x).clamp(max=30)[:, None],
    "up to the stored limit": lambda m, x, p: x + order(x).clamp(max=m.limit)[:, None],
    "frequencies that are stored": lambda m, x, p: x * (order(x)[:, None] * m.frequencies).cos(),
    "one hot": lambda m, x, p: x + one_hot((order(x) // 16).clamp(max=3), WIDTH),
    "a filled row": lambda m, x, p: x + torch.full((x.shape[1], WIDTH), 3.0),
    "the first few": lambda m, x, p: x * (1 + (order(x) < 3)[:, None]),
    "counted ones": lambda m, x, p: x + m.places(torch.ones_like(p).cumsum(1)),
    "counted twos": lambda m, x, p: x + m.places(torch.full_like(p, 2).cumsum(1) // 2),
    "all rows at once": lambda m, x, p: x + m.places(p.reshape(-1) // 32).view_as(x),
    "frequencies made in place": lambda m, x, p: x * (p[..., None] * 50 ** -(torch.arange(WIDTH) / WIDTH)).cos(),
    "a part of a table": lambda m, x, p: x + m.places.weight[: x.shape[1]] * 200 / 200,
    "one token otherwise": lambda m, x, p: x if x.shape[1] > 1 else 2 * x,
    "counted from those given": lambda m, x, p: x + m.places(p // 2 + order(x) // 2),
    "counted from one": lambda m, x, p: x + m.places(torch.arange(1, x.shape[1] + 1)),
    "counted for every row": lambda m, x, p: x + m.places(order(x).expand_as(p)),
    "counted after the cast": lambda m, x, p: x + order(x).to(x.dtype)[:, None] / 100,
    "sines": lambda m, x, p: x + torch.einsum("i,j->ij", order(x).float(), m.frequencies).sin(),
    "stored numbers": lambda m, x, p: x + m.places(m.numbers[:, : x.shape[1]]),
    "a table": lambda m, x, p: x + m.table[None, : x.shape[1], :],
    "a table, rows of others first": lambda m, x, p: x + m.table[3 : x.shape[1] + 3],
    "a table that is no buffer": lambda m, x, p: x + m.attribute[1:, : x.shape[1]],
    "one table of several": lambda m, x, p: x + m.attribute[0, : x.shape[1]],
    "a transposed table": lambda m, x, p: x + m.table.T[:, : x.shape[1]].T,
    "a table that is read twice": lambda m, x, p: (lambda rows: (x + rows) * rows.cos())(m.table[: x.shape[1]]),
    "a table added in place": lambda m, x, p: added_in_place(x, m.table[: x.shape[1]]),
    "a product with a table": lambda m, x, p: x + one_hot(order(x), 128).float() @ m.table,
    "a constant row of a table": lambda m, x, p: x + m.table[:1] + m.places(p),
    "an index that orders nothing": lambda m, x, p: (lambda at: x[:, at] + m.places(at))(order(x)),
}

REFUSED = {
    "frequencies by the length": lambda m, x, p: x * (p[..., None] * m.frequencies * max(x.shape[1], 26) / 26).cos(),
    "up to the last": lambda m, x, p: x + m.places(p.clamp(max=x.shape[1] - 1)),
    "the first half": lambda m, x, p: torch.where((p < x.shape[1] // 2)[..., None], x, 2 * x),
    "multiplied by the length": lambda m, x, p: torch.multiply(x, x.shape[1]),
    "by the last position": lambda m, x, p: x * ((order(x).amax() + 1).clamp(min=26) / 26),
    "by the last given position": lambda m, x, p: x * ((p.amax() + 1).clamp(min=26) / 26),
    "filled with the length": lambda m, x, p: x * torch.full((1,), max(x.shape[1], 26)),
    "the mean from a number on": lambda m, x, p: torch.where((order(x) >= 30)[:, None], mean(x), x),
    "the mean from a quotient on": lambda m, x, p: torch.where((p * 0.01 > 0.3)[..., None], mean(x), x),
    "the mean from a stored number on": lambda m, x, p: torch.where((p >= m.limit)[..., None], mean(x), x),
    "the mean where it is given": lambda m, x, p: torch.where((p >= 30)[..., None], mean(x), x),
}


@pytest.mark.parametrize("names", quick([(name,) for name in GOES_ON] + [tuple(GOES_ON)], [tuple(GOES_ON)]))
def test_contract_1_what_a_module_counts_goes_on_behind_every_number(names):
    """In every run all of them in one module, since a capture is what takes time."""

    def change(m, x, p):
        return x + sum(GOES_ON[name](m, x, p) - x for name in names) / len(names)

    module, fast = compiled(change)
    for prompt in PROMPTS:
        assert_as_whole(module, fast, random_ids(2, TEXT), [prompt, 1, 1, 7, *[1] * (TEXT - prompt - 9)])


@pytest.mark.parametrize("dtype", quick([torch.float16, torch.bfloat16], [torch.bfloat16]))
def test_a_counter_in_16_bit_is_rounded_once(dtype):
    rounded = int(2 / torch.finfo(dtype).eps)  # from here on not every whole number has a value of its own
    pair = compiled(lambda m, x, p: x + 0.01 * torch.arange(x.shape[1], dtype=dtype)[:, None].float())
    assert_as_whole(*pair, random_ids(1, 3 * rounded), [rounded - 5, 6, rounded + 2, rounded - 3])


@pytest.mark.parametrize(
    ("name", "prompt"),
    quick_rows([*itertools.product(REFUSED, PROMPTS)], [*zip([*REFUSED][::3], itertools.cycle(PROMPTS), strict=False)]),
)
def test_contract_7_what_depends_on_the_length_behind_a_number_is_refused(name, prompt):
    with pytest.raises(Exception, match=r"from the length of the input|relates tokens"):
        in_pieces(compiled(REFUSED[name])[1], random_ids(1, TEXT), [prompt, *[1] * (TEXT - prompt)])


@pytest.mark.parametrize("prompts", [(20, 40), (20,)], ids=["seen with another length", "marked"])
def test_contract_7_a_length_of_its_own_that_dynamo_gives_each_input_hides_nothing(prompts):
    _, fast = compiled(REFUSED["by the last given position"])
    for prompt in prompts:
        given = (random_ids(1, prompt), torch.arange(prompt)[None])
        if len(prompts) == 1:
            for value in given:
                torch._dynamo.mark_dynamic(value, 1)
        with pytest.raises(Exception, match="relates tokens"), torch.no_grad(), kvpass.session():
            fast(*given)


def test_two_instances_of_a_class_are_told_apart():
    constants = ({"constant": 2.0}, {"constant": 3.0}, {"constant": 2.0})
    pairs = [
        compiled(lambda m, x, p, c=c: x + c["constant"] * m.places(order(x) + int(c["constant"]))) for c in constants
    ]
    pairs[2][0].to(torch.float64)
    for pair in (*pairs, pairs[0]):
        assert_as_whole(*pair, random_ids(1, 30), [20, 1, 1, 8])


def test_contract_7_a_module_that_an_attribute_has_changed_since_the_prompt_is_refused():
    module, fast = compiled(lambda m, x, p: x * m.factor + m.places(order(x) + m.first))
    for attribute, new in (("first", 1), ("factor", 7)):
        module.first, module.factor = 0, 1.5
        ids = random_ids(2, 20 + new)
        positions = torch.arange(20 + new).expand_as(ids)
        with torch.no_grad(), kvpass.session() as session:
            fast(ids[:, :20].clone(), positions[:, :20].clone())
            setattr(module, attribute, 20)
            with pytest.raises(kvpass.CacheMismatchError, match="an attribute may have changed, as a first position"):
                fast(ids[:, 20:].clone(), positions[:, 20:].clone())
            assert session.cache.columns == 20
        module.first = 0
        assert_as_whole(module, fast, ids, [20, new])


def test_contract_7_a_first_position_that_is_a_tensor_is_refused_and_an_int_is_a_number_like_any_other():
    ids = random_ids(1, 22)
    for shape in ((), (1, 1)):
        _, counting = compiled(lambda m, x, p: x + m.places(order(x) + p))
        with pytest.raises(Exception, match="a number that is given for all tokens"), torch.no_grad(), kvpass.session():
            counting(ids, torch.zeros(shape, dtype=torch.int64))
    with torch.no_grad(), kvpass.session():
        counting(ids[:, :20].clone(), 0)
        with pytest.raises(kvpass.CacheMismatchError, match="or an argument that is a number"):
            counting(ids[:, 20:].clone(), 20)
    _, mixing = compiled(lambda m, x, p: torch.where((order(x) >= p)[:, None], x.mean(1, keepdim=True), x))
    with pytest.raises(Exception, match="relates tokens"), torch.no_grad(), kvpass.session():
        mixing(ids, 30)


PARTS = ["segments", "segments that are given", "scaling that is given"]


@pytest.mark.parametrize("name", quick(PARTS, PARTS[1:2]))
def test_a_prompt_in_parts_of_a_longer_tensor_is_gone_on_with_by_tensors_of_their_own(name):
    """Dynamo captures again, since parts have strides."""
    (module, fast), ids = compiled(GOES_ON[name]), random_ids(2, 30)
    positions = torch.arange(30).repeat(2, 1)
    with torch.no_grad(), kvpass.session():
        found = [fast(ids[:, :20], positions[:, :20])]
        found += [fast(ids[:, a:b].clone(), positions[:, a:b].clone()) for a, b in ((20, 21), (21, 29), (29, 30))]
        assert_close("logits", torch.cat(found, 1), module(ids, positions), atol=1e-4)


def test_contract_7_a_module_that_is_first_called_with_one_token_is_refused_and_works_after_several():
    (module, fast), ids = compiled(GOES_ON["segments that are given"]), random_ids(1, 30)
    with pytest.raises(kvpass.CacheMismatchError, match="captured for one token alone: prefill a prompt of several"):
        in_pieces(fast, ids[:, :2], [1, 1])
    for pieces in ([20, *[1] * 10], [*[1] * 5, 25]):
        assert_as_whole(module, fast, ids, pieces)


def ends(m, x, p):
    assert x.shape[1] <= END
    return x


ENDS = {
    "an assertion": ends,
    "a branch on a multiple": lambda m, x, p: x if 2 * x.shape[1] < 2 * END + 1 else 0.3 * x,
    "a table": lambda m, x, p: x + m.short(order(x)),
    "a table, counted for every row": lambda m, x, p: x + m.short(order(x).expand_as(p)),
    "a table, counted ones": lambda m, x, p: x + m.short(torch.ones_like(p).cumsum(1) - 1),
}
"""Compiled code ends the process when it looks up a row beyond a table."""

BRANCHES = {
    "beyond a multiple": lambda m, x, p: 0.3 * x if 3 * x.shape[1] >= 3 * END + 1 else x,
    "even lengths": lambda m, x, p: 0.3 * x if x.shape[1] % 2 == 0 else x,
    "a single length": lambda m, x, p: 0.3 * x if x.shape[1] == END else x,
    "rows and tokens": lambda m, x, p: 0.3 * x if x.shape[0] * x.shape[1] > END else x,
}


@pytest.mark.parametrize("name", quick([*ENDS], ["an assertion", "a branch on a multiple", "a table, counted ones"]))
def test_contract_7_a_session_ends_where_the_capture_does(name):
    (module, fast), ids = compiled(ENDS[name]), random_ids(1, 30)
    cache = assert_as_whole(module, fast, ids[:, :END], [20, 1, 2, 1])
    for new in (1, 3):
        refusal = pytest.raises(ValueError, match=f"{new} tokens after 24: .* not take more than 24")
        with refusal, torch.no_grad(), kvpass.session() as session:
            session.cache = cache
            fast(ids[:, END : END + new].contiguous(), torch.arange(END, END + new)[None])
        assert cache.columns == END
    if name.startswith("a table"):  # of others it is a capture of its own
        with pytest.raises(ValueError, match=r"25 tokens after 0: .* not take more than 24"):
            in_pieces(fast, ids[:, : END + 1], [END + 1])


@pytest.mark.parametrize("name", quick([*BRANCHES], ["beyond a multiple", "even lengths", "rows and tokens"]))
def test_contract_7_a_module_that_branches_on_its_length_is_refused(name):
    with pytest.raises(Exception, match="branches on the length of its input"):
        in_pieces(compiled(BRANCHES[name])[1], random_ids(2, 40), [40])


def test_as_many_rows_as_tokens_in_a_first_call_are_told_apart_or_refused():
    ids = random_ids(13, 20)
    with pytest.raises(Exception, match="as many rows as tokens"):
        in_pieces(compiled(GOES_ON["segments"])[1], ids, [13, *[1] * 7])
    module, fast = compiled(GOES_ON["segments"])
    in_pieces(fast, ids, [20])
    assert_as_whole(module, fast, ids, [13, *[1] * 7])
