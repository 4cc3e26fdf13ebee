"""The raw backend on a decoder of our own, and both frontends on the same Llama."""

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import kvpass
from compiled_models import in_pieces, padded, prompts_of, two_layers
from kvpass.compiler import backend
from masked_oracle import kept_columns
from numeric_checks import assert_close
from pairwise import quick, quick_rows
from small_decoders import SmallDecoder
from tiny_models import in_session, random_ids, raw


class Decoder(SmallDecoder):
    """With grouped heads, or keys and values repeated to all heads; it numbers its tokens if not told positions."""

    def __init__(self, repeat: bool = False, layers: int = 1, wide: float = 1.5) -> None:
        super().__init__(longest=192, wide=wide, layers=layers, kv_heads=2)
        self.repeat = repeat

    def attend(self, q, k, v, layer):
        if self.repeat:
            k, v = (part.repeat_interleave(2, 1) for part in (k, v))
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=not self.repeat)


def compiled(module, *, dynamic=True, **options):
    given = {"policy": "snapkv", "budget": 16, "window": 8, "compiler": "eager", **options}
    return raw(module, given, dynamic=dynamic)


def counted(ids):
    """Positions of a text from its beginning."""
    return torch.arange(ids.shape[1]).repeat(len(ids), 1)


@pytest.fixture
def decoder():
    return Decoder()


@pytest.mark.parametrize(("block", "numbered"), quick_rows([(2, False), (13, True), (89, False)], [(13, True)]))
def test_blocks_of_a_prompt_change_nothing(block, numbered):
    module, ids = Decoder(layers=2), random_ids(2, 93)
    text = (ids,) if numbered else (ids, counted(ids))
    (logits, cache), (expected, whole) = (
        in_session(compiled(module, policy="lava", budget=24, prefill_block=given), [90, 2, 1], *text)
        for given in (block, 10**6)
    )
    assert torch.equal(cache.positions, whole.positions)
    assert_close("logits", logits, expected, atol=2e-5)
    assert_close("logits of the prompt", logits[:, :90], module(*text)[:, :90], atol=2e-5)


@pytest.mark.parametrize("compiler", quick(["eager", "inductor"], ["eager"]))
@pytest.mark.parametrize("repeat", quick([False, True], [True]), ids=["grouped", "repeated"])
def test_contract_2_each_row_keeps_the_budget_and_what_it_keeps_alone(repeat, compiler):
    """Of two KV heads, also where they are repeated."""
    fast = compiled(Decoder(repeat), compiler=compiler)
    ids, mask = padded(40, 25, 12)
    _, cache = in_session(fast, [40], ids, (mask.cumsum(1) - 1).clamp(min=0), attention_mask=mask)
    assert cache.lengths.sum((1, 2)).tolist() == [16 * 2, 16 * 2, 12 * 2]
    for row, prompt in enumerate(prompts_of(40, 25, 12)):
        n, twice = prompt.numel(), prompt.repeat(2, 1)
        _, alone = in_session(fast, [n], twice, counted(twice))
        assert torch.equal(kept_columns(cache, ids.shape[1])[row, :, :, -n:], kept_columns(alone, n)[0])


def test_both_frontends_keep_the_same_entries_and_give_the_same_logits():
    text, sizes = random_ids(2, 63), [60, 1, 1, 1]
    model, through_interface = two_layers(layers=1)
    expected, cache = in_pieces(through_interface, text, sizes)

    def logits(input_ids, position_ids):
        return model(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits

    assert model.config._attn_implementation == "sdpa"
    found, other = in_session(compiled(logits, policy="lava", budget=20), sizes, text, counted(text))
    assert torch.equal(other.positions, cache.positions) and other.state.layout == cache.state.layout
    assert_close("logits", found, expected, atol=1e-5)


def test_a_raw_module_needs_a_session_and_no_grad_and_no_padding_where_it_numbers_its_own_tokens(decoder):
    (ids, mask), fast = padded(40, 31), compiled(decoder)
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"runs inside `with kvpass.session\(\):`"):
        fast(ids, counted(ids))
    with pytest.raises(RuntimeError, match="no_grad"), kvpass.session():
        fast(ids, counted(ids))
    with pytest.raises(ValueError, match="counts its own positions"), torch.no_grad(), kvpass.session(mask):
        fast(ids)


def by_hand(fast, cache, ids):
    """A session in which ``fast`` goes on from a cache, whose state it leaves in ``session.cache``."""
    with torch.no_grad(), kvpass.session() as session:
        session.cache = cache
        positions = torch.arange(cache.columns, cache.columns + ids.shape[1]).expand(ids.shape[0], -1)
        logits = fast(ids, positions.contiguous())
    return logits, session.cache


@pytest.mark.parametrize("compiler", quick(["eager", "inductor"], ["eager"]))
def test_a_prompt_in_inference_mode_is_continued_outside_and_a_reusable_cache_stays(decoder, compiler):
    fast, logits = compiled(decoder, compiler=compiler), []
    for mode in (torch.inference_mode, torch.no_grad):
        with kvpass.session() as session:
            with mode():
                fast(random_ids(1, 40), torch.arange(40)[None])
            cache = session.cache.clone()
            with torch.no_grad():
                logits.append(fast(random_ids(1, 1, seed=1), torch.tensor([[40]])))
    assert torch.equal(*logits)
    cache.reusable = True
    found = [by_hand(fast, cache, random_ids(1, 5, seed=1)) for _ in range(2)]
    assert torch.equal(found[0][0], found[1][0])
    assert [part.columns for part in (cache, found[0][1], found[1][1])] == [40, 45, 45]


class Broken(Decoder):
    """Dynamo makes two graphs of it."""

    def forward(self, ids, positions):
        x = self.layer(self.embed(ids), positions, 0)
        torch._dynamo.graph_break()
        return self.head(self.layer(x, positions, 1))


def test_contract_7_a_graph_break_does_not_mix_two_graphs_in_one_cache():
    options = {"policy": "snapkv", "budget": 16, "window": 8, "compiler": "eager"}
    fast = torch.compile(Broken(layers=2), backend="kvpass", dynamic=True, options=options)
    with torch.no_grad(), kvpass.session() as session:
        with pytest.raises(kvpass.CacheMismatchError, match="fullgraph=True"):
            fast(random_ids(1, 30), torch.arange(30)[None])
        assert session.cache.get_seq_length() == 30


def test_a_session_refuses_another_module_another_policy_and_another_batch(decoder):
    first = compiled(decoder)
    token, position = random_ids(2, 1, seed=1), torch.full((2, 1), 40)
    with torch.no_grad(), kvpass.session() as session:
        first(random_ids(2, 40), torch.arange(40).repeat(2, 1))
        expected = by_hand(first, session.cache.clone(), token)[0]
        with pytest.raises(kvpass.CacheMismatchError, match="1 rows"):
            first(token[:1].clone(), position[:1].clone())
        for second in (compiled(Decoder(wide=1)), compiled(decoder, policy="tova")):
            with pytest.raises(kvpass.CacheMismatchError, match="another module"):
                second(token, position)
            with pytest.raises(kvpass.CacheMismatchError, match="another module"):
                by_hand(second, session.cache, token)
        assert session.cache.columns == 40 and torch.equal(first(token, position), expected)


def test_what_a_forward_reads_is_the_modules_own_between_sessions_and_cannot_change_within_one(decoder):
    """Weights replaced and a flag; tests/misuse has weights that are written to."""
    decoder.dropped, decoder.drop = 0, nn.Dropout(0.5)
    plain_forward = type(decoder).forward

    class Flagged(type(decoder)):
        def forward(self, ids, positions):
            return self.drop(plain_forward(self, ids, positions)) * (0.5 if self.dropped else 1.0)

    decoder.__class__ = Flagged
    fast = compiled(decoder.eval(), budget=1 << 20)
    ids, positions, token = random_ids(1, 40), torch.arange(40)[None], random_ids(1, 1, seed=1)
    changes = (
        lambda: setattr(decoder.head, "weight", nn.Parameter(decoder.head.weight * 2)),
        lambda: setattr(decoder, "dropped", 1),
    )
    with torch.no_grad():
        for change in (lambda: None, *changes):
            change()
            expected = decoder(torch.cat([ids, token], 1), torch.arange(41)[None])[:, -1:]
            with kvpass.session():
                fast(ids, positions)
                assert_close("logits", fast(token, torch.tensor([[40]])), expected, atol=1e-5)
        with kvpass.session():
            fast(ids, positions)
            decoder.dropped = 0
            with pytest.raises(kvpass.CacheMismatchError, match="an attribute may have changed"):
                fast(token, torch.tensor([[40]]))
    with pytest.raises(Exception, match="dropout in training mode: call eval"), torch.no_grad(), kvpass.session():
        compiled(decoder.train(), budget=1 << 20)(ids, positions)


def test_contract_7_a_graph_of_one_length_and_an_unknown_compiler_are_refused(decoder):
    """The graph would be that of one token while decoding."""
    for given, message in (
        ({"dynamic": False}, r"for 40 tokens and no other length.*dynamic=True"),
        ({"compiler": "none"}, "compiler='none': must be one of inductor, eager"),
    ):
        with pytest.raises(Exception, match=message), torch.no_grad(), kvpass.session():
            compiled(decoder, **given)(random_ids(1, 40), torch.arange(40)[None])


class WithLoss(Decoder):
    """Numbers in which no token has a part, beside its logits."""

    def forward(self, ids, positions):
        return super().forward(ids, positions), self.head.bias.mean(), self.head.bias


def test_outputs_without_a_token_axis_are_let_alone(decoder):
    module = WithLoss()
    ids, positions = random_ids(1, 40), torch.arange(41)[None]
    fast = compiled(module, budget=100)
    with torch.no_grad(), kvpass.session():
        fast(ids, positions[:, :40].contiguous())
        token = random_ids(1, 1, seed=1)
        logits, mean, bias = fast(token, positions[:, 40:].contiguous())
        assert_close("logits", logits, module(torch.cat([ids, token], 1), positions)[0][:, -1:], atol=1e-4)
        assert mean == module.head.bias.mean() and torch.equal(bias, module.head.bias)


def test_lengths_that_a_phase_was_not_compiled_for_are_refused(decoder, monkeypatch):
    """Dynamo has captured the module for any length and checks nothing that a compiler assumes later."""

    def short_or_long(gm, examples, **_):
        for value in examples:
            if isinstance(value, torch.Tensor) and not value.is_floating_point():
                bool(value.shape[1] < 50)
        return gm.forward

    monkeypatch.setattr(backend, "compile_fx", short_or_long)
    fast = compiled(decoder, compiler="inductor")

    def run(ids):
        with torch.no_grad(), kvpass.session() as session:
            return fast(ids, counted(ids)), session.cache.lengths

    short = run(random_ids(1, 40))
    with pytest.raises(ValueError, match=r"sizes of this call .* < 50"):
        run(random_ids(1, 60))
    for found, expected in zip(run(random_ids(1, 40)), short, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("told", quick([False, True], [True]))
def test_the_whole_text_is_not_appended_to_its_beginning(decoder, told):
    module, ids = compiled(decoder), random_ids(2, 40)

    def call(new, first):
        where = [torch.arange(first, first + new.shape[1])[None]] if told else []
        return module(new, *where)[:, -1:].argmax(-1)

    with torch.no_grad(), kvpass.session() as session:
        token = call(ids, 0)
        for new in (torch.cat([ids, token], 1), ids):
            with pytest.raises(kvpass.CacheMismatchError, match="begins with all 40 tokens of the prompt"):
                call(new, 0)
        assert session.cache.columns == 40
        if told:
            call(ids, 40)  # the same words again, as its positions say
        call(random_ids(2, 90, seed=1), session.cache.columns)
