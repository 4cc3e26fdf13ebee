"""KVPassLM against the harness's own Hugging Face model, and against eager attention to what was kept."""

import copy
import json
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: pip install 'kvpass[eval]'")

from lm_eval.models.huggingface import HFLM

import kvpass
from harness_models import MODEL, TIGHT, TOKENIZER, build, instances
from kvpass.eval.harness.model import KVPassLM
from kvpass.eval.prompt import SEPARATOR, split_at_separator
from kvpass.eval.tasks.needle import hide
from masked_oracle import MaskedOracle, kept_columns

pytestmark = pytest.mark.usefixtures("compile_once")

CHOICES = (" silver", " 007", " 007 004 001", " the old fox .", " 007 004 002")
GREEDY = {"do_sample": False, "until": ["."], "max_gen_toks": 6}
CONTEXTS = [hide("single", n, n)[0].context + hide("single", n, n)[0].question for n in (60, 130, 41, 97)]


def likelihoods(lm, requests):
    return lm.loglikelihood(instances("loglikelihood", requests), disable_tqdm=True)


def generations(lm, prompts, settings=GREEDY):
    return lm.generate_until(instances("generate_until", [(p, dict(settings)) for p in prompts]), disable_tqdm=True)


def measured(lm, name):
    return lm.get_model_info()["kvpass"][name]


def difference(some, others):
    return max(abs(a[0] - b[0]) for a, b in zip(some, others, strict=True))


# contexts interleaved, and each with the choices in another order, so that batches of continuations are ragged
MULTIPLE_CHOICE = [(text, CHOICES[(i + j) % 5]) for j in range(5) for i, text in enumerate(CONTEXTS)]
REQUESTS = [*MULTIPLE_CHOICE, ("", "the old fox"), ("fox", " was very old"), (CONTEXTS[0] + "  ", "007 004")]


@pytest.fixture(scope="module")
def stock():
    return build(HFLM, batch_size=4)


@pytest.fixture(scope="module")
def expected(stock):
    return likelihoods(stock, REQUESTS)


@pytest.fixture(scope="module")
def tight():
    """The compressing model at batch size 1 and 4; graphs are compiled once."""
    return {size: build(batch_size=size, **TIGHT) for size in (1, 4)}


# -- likelihood --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "arguments"),
    [
        pytest.param(1, {}, marks=pytest.mark.exhaustive, id="full"),
        pytest.param(3, {"policy": "none"}, id="batch 3"),
        pytest.param(8, {"policy": "lava", "budget": 4096, "num_uncompressed_tokens": 3}, id="batch 8, huge budget"),
    ],
)
def test_without_a_limit_scores_and_texts_are_those_of_the_stock_model(size, arguments, stock, expected):
    lm = build(batch_size=str(size), **arguments)
    found = likelihoods(lm, REQUESTS)
    assert difference(found, expected) < 1e-4
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    if size < 8:
        assert generations(lm, CONTEXTS) == generations(stock, CONTEXTS)


def test_a_tight_budget_is_felt_by_every_choice_and_not_by_the_rest_of_the_batch(tight, expected):
    before = measured(tight[1], "prompts_compressed")
    found = {size: likelihoods(lm, MULTIPLE_CHOICE) for size, lm in tight.items()}
    assert measured(tight[1], "prompts_compressed") - before == len(CONTEXTS), "once for all its continuations"
    assert difference(found[1], found[4]) < 1e-4
    for request, score, other in zip(MULTIPLE_CHOICE, found[1], expected, strict=False):
        assert abs(score[0] - other[0]) > 1e-3, request


def test_continuations_are_scored_at_their_true_positions_against_what_was_kept(tight):
    """The oracle is the eager model, whose last context token and continuation see only the kept positions."""
    lm, context, choice = tight[1], CONTEXTS[1], CHOICES[3]
    ids = torch.tensor([TOKENIZER(context)["input_ids"]])
    continuation = torch.tensor([TOKENIZER(choice, add_special_tokens=False)["input_ids"]])
    whole, held = torch.cat([ids, continuation[:, :-1]], 1), ids[:, :-1]
    keep = kept_columns(lm.model.compress(held), held.shape[1])
    assert not keep.all()
    logits = MaskedOracle(MODEL).logits(whole, torch.ones_like(whole), keep)[0, -continuation.shape[1] :]
    ((score, greedy),) = likelihoods(lm, [(context, choice)])
    wanted = logits.log_softmax(-1).gather(1, continuation[0][:, None]).sum()
    assert score == pytest.approx(float(wanted), abs=1e-4)
    assert greedy == torch.equal(logits.argmax(-1), continuation[0])


def test_the_greedy_continuation_is_called_greedy(tight):
    (text,) = generations(tight[1], CONTEXTS[:1], {**GREEDY, "until": [], "max_gen_toks": 3})
    found = likelihoods(tight[1], [(CONTEXTS[0], f" {text}"), (CONTEXTS[0], f" {text} fox")])
    assert [greedy for _, greedy in found] == [True, False]


def test_several_uncompressed_tokens_are_fed_to_the_compressed_cache(tight):
    """The last three tokens of the context do not observe: what is kept is what the shorter prompt keeps."""
    lm = build(**TIGHT, num_uncompressed_tokens=3)
    ids = torch.tensor([TOKENIZER(CONTEXTS[0])["input_ids"]])
    cache = tight[1].model.compress(ids[:, :-3])
    logits = tight[1].model(ids[:, -3:], past_key_values=cache).logits[0, -1].log_softmax(-1)
    (token,) = TOKENIZER(CHOICES[0], add_special_tokens=False)["input_ids"]
    ((score, _),) = likelihoods(lm, [(CONTEXTS[0], CHOICES[0])])
    assert score == pytest.approx(float(logits[token]), abs=1e-4)


def test_rolling_likelihood_is_the_stock_models_or_refused(stock, tight):
    documents = instances("loglikelihood_rolling", [(text,) for text in CONTEXTS[:2]])
    found = build().loglikelihood_rolling(documents, disable_tqdm=True)
    assert found == pytest.approx(stock.loglikelihood_rolling(documents, disable_tqdm=True), abs=1e-3)
    with pytest.raises(ValueError, match=r"loglikelihood_rolling with policy 'lava'.*no context to compress"):
        tight[1].loglikelihood_rolling(documents)


# -- generation --------------------------------------------------------------------------------------------------------


def test_tokens_of_the_prompt_alone_are_not_scored_without_an_uncompressed_one():
    plain = build(num_uncompressed_tokens=0, **TIGHT)
    one = {**GREEDY, "until": [], "max_gen_toks": 1}
    assert generations(plain, CONTEXTS, one) == generations(build(), CONTEXTS, one)
    with pytest.raises(ValueError, match="num_uncompressed_tokens=0"):
        likelihoods(plain, MULTIPLE_CHOICE)


def test_generation_does_not_depend_on_the_batch_and_stops_where_it_should(tight):
    long = {**GREEDY, "until": [], "max_gen_toks": 12}
    alone = generations(tight[1], CONTEXTS, long)
    assert generations(tight[4], CONTEXTS, long) == alone
    word = alone[0].split()[3]
    stopped = generations(tight[4], CONTEXTS, {**long, "until": [word]})
    assert stopped == [text.split(word)[0] for text in alone]
    assert stopped != alone


def test_beams_search_in_the_compressed_cache(stock, tight):
    beams = {**GREEDY, "num_beams": 3}
    assert generations(build(batch_size=3), CONTEXTS, beams) == generations(stock, CONTEXTS, beams)
    asked = [*CONTEXTS, CONTEXTS[1]]
    found = [generations(tight[size], asked, beams) for size in (1, 4)]
    assert found[0] == found[1] != generations(stock, asked, beams)


def test_a_prompt_with_nothing_to_compress_is_kept_whole(stock):
    lm = build(**TIGHT)
    assert generations(lm, [""]) == generations(build(), [""])
    assert difference(likelihoods(lm, [("", " fox")]), likelihoods(stock, [("", " fox")])) < 1e-4
    facts = lm.get_model_info()["kvpass"]
    assert (facts["prompts_compressed"], facts["prompts_not_compressed"]) == (0, 2)
    assert facts["kept_fraction"] is None


# -- scope -------------------------------------------------------------------------------------------------------------


def asked(text):
    return text.replace(" question", f"{SEPARATOR} question")


SCOPED = [asked(text) + extra for text, extra in zip(CONTEXTS, ("", "", " not", ""), strict=True)]


def test_scope_context_compresses_what_stands_before_the_separator():
    lm = build(scope="context", batch_size=2, **TIGHT)
    wanted = []
    for text in SCOPED:
        before, question = (
            TOKENIZER(part, return_tensors="pt", add_special_tokens=first)["input_ids"]
            for part, first in zip(split_at_separator(text), (True, False), strict=True)
        )
        out = lm.model.generate(question, past_key_values=lm.model.compress(before), max_new_tokens=6, do_sample=False)
        wanted.append(TOKENIZER.decode(out[0, question.shape[1] :], skip_special_tokens=True))
    assert generations(lm, SCOPED, {**GREEDY, "until": []}) == wanted
    alone = build(scope="context", **TIGHT)
    pairs = [(text, choice) for text in SCOPED for choice in CHOICES]
    assert difference(likelihoods(lm, pairs), likelihoods(alone, pairs)) < 1e-4


def test_the_separator_changes_nothing_but_what_is_compressed(expected):
    pairs = [(asked(context), choice) for context, choice in MULTIPLE_CHOICE]
    assert difference(likelihoods(build(scope="context"), pairs), expected[: len(pairs)]) < 1e-4
    lm = build()
    assert difference(likelihoods(lm, pairs[:2]), expected[:2]) < 1e-4
    assert generations(lm, [asked(CONTEXTS[0])]) == generations(lm, CONTEXTS[:1])


def test_what_requests_share_is_compressed_once_at_any_batch_size():
    """Four texts with one to four questions of two lengths each; text and question alone are the reference."""
    about = [split_at_separator(asked(text))[0] for text in CONTEXTS]
    questions = (" the fox", " question the fox is", " the crow", " question the crow is")
    texts = [f"{about[i]}{SEPARATOR}{questions[j]}" for j in range(4) for i in range(4) if j <= i]
    pairs = [(text, CHOICES[index % len(CHOICES)]) for index, text in enumerate(texts)]
    alone, together = (build(scope="context", batch_size=size, **TIGHT) for size in (1, 3))
    settings = {**GREEDY, "until": []}
    expected = generations(alone, texts, settings), likelihoods(alone, pairs)
    assert generations(together, texts, settings) == expected[0]
    assert measured(together, "prompts_compressed") == 4
    assert difference(likelihoods(together, pairs), expected[1]) < 1e-4
    assert measured(together, "prompts_compressed") == 8
    some = [generations(together, texts[:1], {**settings, "max_gen_toks": tokens})[0] for tokens in (3, 5)]
    requests = [(texts[0], {**settings, "max_gen_toks": tokens}) for tokens in (3, 5, 6)]
    before = measured(together, "prompts_compressed")
    found = together.generate_until(instances("generate_until", requests), disable_tqdm=True)
    assert found == [*some, expected[0][0]]
    assert measured(together, "prompts_compressed") - before == 1


@pytest.mark.parametrize("text", ["no separator here", f"nothing after it{SEPARATOR}", f"a{SEPARATOR}b{SEPARATOR}  "])
def test_scope_context_needs_a_question(text):
    lm = build(scope="context", **TIGHT)
    for ask in (lambda: generations(lm, [text]), lambda: likelihoods(lm, [(text, " fox")])):
        with pytest.raises(ValueError, match="scope='context'"):
            ask()


# -- prompts -----------------------------------------------------------------------------------------------------------


def test_long_prompts_are_cut_as_the_stock_model_cuts_them(stock):
    cut = build(HFLM, max_length=50)
    lm = build(max_length=50, batch_size=2)
    assert difference(likelihoods(lm, MULTIPLE_CHOICE), likelihoods(cut, MULTIPLE_CHOICE)) < 1e-4
    assert generations(lm, CONTEXTS) == generations(cut, CONTEXTS) != generations(stock, CONTEXTS)
    assert lm.get_model_info()["kvpass"]["requests_truncated"] > 0
    with pytest.raises(ValueError, match="continuation of 60 tokens"):
        likelihoods(lm, [("fox", " fox" * 60)])


@pytest.mark.parametrize("truncation", ["left", "middle"])
def test_both_scopes_see_the_same_part_of_a_long_prompt(truncation):
    """The question is longer than half of what fits, and in the middle of the text."""
    texts = [text.replace(". ", f".{SEPARATOR} ", 1) for text in (CONTEXTS[1], CONTEXTS[3])]
    pairs = [(text, choice) for text in texts for choice in CHOICES]
    if truncation == "left":
        texts, pairs = SCOPED, [(text, choice) for text in SCOPED for choice in CHOICES]
    prompt, context = (build(max_length=50, truncation=truncation, scope=scope) for scope in ("prompt", "context"))
    assert difference(likelihoods(prompt, pairs), likelihoods(context, pairs)) < 1e-4
    assert generations(prompt, texts) == generations(context, texts)
    assert measured(context, "requests_truncated") > 0


@pytest.mark.parametrize(
    "arguments",
    [{"num_uncompressed_tokens": 60}, {"scope": "context"}, {"num_uncompressed_tokens": 60, "truncation": "middle"}],
)
def test_a_cut_that_leaves_nothing_to_compress_is_refused(arguments):
    lm = build(max_length=50, **arguments, **TIGHT)
    text = CONTEXTS[1].replace(". ", f".{SEPARATOR} ", 1)
    with pytest.raises(ValueError, match=r"(60|1\d\d) tokens are fed after compression, but only 50"):
        likelihoods(lm, [(text, " fox")])


def test_room_for_one_token_is_enough_where_nothing_is_compressed():
    settings = {**GREEDY, "max_gen_toks": 49, "until": []}
    stock, lm = build(HFLM, max_length=50), build(max_length=50)
    assert generations(lm, CONTEXTS, settings) == generations(stock, CONTEXTS, settings)
    with pytest.raises(ValueError, match="only 1 tokens of the prompt fit"):
        generations(build(max_length=50, **TIGHT), CONTEXTS, settings)


def test_a_separator_belongs_into_the_context():
    with pytest.raises(ValueError, match="stands in the continuation"):
        likelihoods(build(), [("fox", f" was {SEPARATOR}old")])


# -- the harness's request cache, and what it records ------------------------------------------------------------------


def test_answers_reach_the_cache_while_the_run_goes_on(tight):
    lm, added = tight[4], []
    before = lm.cache_hook
    lm.set_cache_hook(SimpleNamespace(dbdict=None, add_partial=lambda *answered: added.append(answered)))
    try:
        scores = likelihoods(lm, MULTIPLE_CHOICE)
        answers = generations(lm, CONTEXTS)
    finally:
        lm.set_cache_hook(before)
    seen = {(kind, json.dumps(request)): answer for kind, request, answer in added}
    assert len(added) == len(seen) == len(MULTIPLE_CHOICE) + len(CONTEXTS)
    assert [seen["loglikelihood", json.dumps(request)] for request in MULTIPLE_CHOICE] == scores
    assert [seen["generate_until", json.dumps((text, GREEDY))] for text in CONTEXTS] == answers


def test_model_info_says_what_was_kept(tight):
    lm = build(policy="snapkv", budget=20, window=6, pool="avg")
    generations(lm, CONTEXTS[:1])
    cache = lm.model.compress(torch.tensor([TOKENIZER(CONTEXTS[0])["input_ids"][:-1]]))
    facts = lm.get_model_info()
    assert facts["model_num_parameters"] == MODEL.num_parameters()
    facts = json.loads(json.dumps(facts["kvpass"]))
    tokens = len(TOKENIZER(CONTEXTS[0])["input_ids"]) - 1
    assert facts["kept_fraction"] == 20 / tokens
    assert facts["cache_bytes_peak"] >= cache.nbytes > facts["entry_bytes_kept"] > 0
    assert facts["policy"] == "snapkv" and facts["policy_options"]["pool"] == "avg"
    assert (facts["budget"], facts["scope"], facts["num_uncompressed_tokens"]) == ("20", "prompt", 1)
    assert facts["version"] == kvpass.__version__ and facts["torch"] == torch.__version__


# -- adapters ----------------------------------------------------------------------------------------------------------


def test_an_adapter_is_scored_as_the_stock_model_scores_it_and_a_trained_prompt_is_refused(tmp_path):
    peft = pytest.importorskip("peft", reason="needs peft, which lm_eval's peft= reads adapters with")
    MODEL.save_pretrained(tmp_path / "base")
    TOKENIZER.save_pretrained(tmp_path / "base")
    configs = {
        "lora": peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False),
        "prompt": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    }
    for name, config in configs.items():
        peft.get_peft_model(copy.deepcopy(MODEL), config).save_pretrained(tmp_path / name)
    given = {"model": str(tmp_path / "base"), "tokenizer": None, "device": "cpu", "peft": str(tmp_path / "lora")}
    found, expected = (likelihoods(build(kind, **given), MULTIPLE_CHOICE[:4]) for kind in (KVPassLM, HFLM))
    assert difference(found, expected) < 1e-4
    with pytest.raises(ValueError, match=r"peft=.*prompt.: a trained prompt cannot be merged"):
        build(**{**given, "peft": str(tmp_path / "prompt")})


# -- arguments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policy": "lavaa", "budget": 64}, r"policy='lavaa': did you mean 'lava'"),
        ({"budgets": 64}, r"budgets=64: not an option .* did you mean 'budget'"),
        ({"policy": "lava"}, r"budget=None: policy 'lava' needs one"),
        ({"policy": "lava", "budget": 8}, r"budget=8: must be at least window \+ 1"),
        ({"budget": 64}, r"budget=64: policy 'full' keeps everything"),
        ({"scope": "question"}, r"scope='question': must be one of 'prompt', 'context'"),
        ({"num_uncompressed_tokens": -1}, r"num_uncompressed_tokens=-1: must be an int >= 0"),
        ({"num_uncompressed_tokens": 2, "scope": "context"}, r"num_uncompressed_tokens=2: scope='context'"),
        ({"truncation": True}, r"truncation=True: must be one of 'left', 'middle'"),
        ({"compiler": "jit"}, r"compiler='jit'"),
        ({"backend": "seq2seq"}, r"backend='seq2seq'"),
        ({"parallelize": True}, r"parallelize=True: not supported"),
        ({"batch_size": "auto"}, r"batch_size='auto': must be an int"),
        ({"batch_size": 0}, r"batch_size=0: must be an int >= 1"),
    ],
)
def test_bad_arguments_are_refused_before_a_model_is_loaded(arguments, message):
    with pytest.raises(ValueError, match=message):
        KVPassLM(pretrained="no such model", **arguments)


def test_a_fraction_that_leaves_too_little_is_refused_before_anything_is_computed():
    lm = build(policy="lava", budget=0.1, window=6)
    with pytest.raises(ValueError, match=r"budget 0.1 is .* entries"):
        likelihoods(lm, MULTIPLE_CHOICE)
    with pytest.raises(ValueError, match=r"budget 0.1 is .* entries"):
        generations(lm, CONTEXTS)
    with pytest.raises(ValueError, match="nothing to report"):
        lm.model.report()


@pytest.mark.parametrize("budget", [0.2, "2KiB"])
def test_a_short_context_is_kept_whole_by_a_fraction_and_by_bytes_beside_longer_ones(budget, stock):
    short = [("fox", " was very old"), ("the old fox", " 007")]
    lm = build(batch_size=4, policy="snapkv", window=15, budget=budget)
    found = likelihoods(lm, [*short, (CONTEXTS[1], " silver"), (CONTEXTS[3], " silver")])
    assert difference(found[:2], likelihoods(stock, short)) < 1e-4
    assert generations(lm, ["the old fox"]) == generations(stock, ["the old fox"])
    assert measured(lm, "kept_fraction") < 0.5


@pytest.mark.parametrize("settings", [{"max_gen_toks": 4096}, {"max_length": 64}, {"num_return_sequences": 2}])
def test_generation_arguments_that_cannot_hold_are_refused(settings):
    with pytest.raises(ValueError, match="generation arguments"):
        generations(build(), CONTEXTS[:1], settings)
