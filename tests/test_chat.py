"""Documents and chats: the tokens of ``generate`` on the whole chat, for the templates of many models."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerFast

import kvpass
from byte_tokenizer import byte_tokenizer
from command_line import invoke
from kvpass import Chat, Document
from masked_oracle import MaskedOracle
from pairwise import quick

TEMPLATES = Path(__file__).parent / "support" / "chat_templates"
SPECIAL = (
    "<|im_start|> <|im_end|> <|im_sep|> <think> </think> <|begin_of_text|> <|start_header_id|> <|end_header_id|> "
    "<|eot_id|> <bos> <start_of_turn> <end_of_turn> <s> </s> [INST] [/INST] <|system|> <|user|> <|assistant|> <|end|> "
    "<|endoftext|> <|User|> <|Assistant|> <|eos|> <|start|> <|message|> <|channel|> <|return|>"
).split()
TEXT = "The tide turns at noon.\nBoats leave the harbour before; nets are mended on the quay, ropes too.\n" * 3
QUESTIONS = ("When does the tide turn?", "¿And what is mended?", "1) Where?")
NO_SYSTEM = ("gemma2",)
MOVES_SYSTEM = ("mistral",)
"""Templates that write the system text before the last message, wherever that is."""
UNLIKE = ("deepseek", *NO_SYSTEM, "gpt_oss", *MOVES_SYSTEM, "qwen3")
"""Templates that the quick suite tries: the others write turns as one of these does, with other words."""
NEW = 6


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with the special tokens of all templates."""
    return byte_tokenizer([TEXT], 400, SPECIAL, additional_special_tokens=SPECIAL)


@pytest.fixture(scope="module")
def model(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """A random llama of one layer."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        num_hidden_layers=1,
        eos_token_id=None,
        bos_token_id=None,
        initializer_range=0.3,
        **sizes,
    )
    made = LlamaForCausalLM(config).eval()
    made.generation_config.pad_token_id = 0
    return made


@pytest.fixture(scope="module")
def fast(model: PreTrainedModel) -> Any:
    return kvpass.compile(model, policy="full", backend="eager")


@pytest.fixture(params=quick([path.stem for path in sorted(TEMPLATES.iterdir())], UNLIKE))
def templated(request: Any, tokenizer: PreTrainedTokenizerFast) -> Iterator[tuple[str, PreTrainedTokenizerFast]]:
    tokenizer.chat_template = (TEMPLATES / f"{request.param}.jinja").read_text()
    yield request.param, tokenizer
    tokenizer.chat_template = None


def answer(model: PreTrainedModel, tokenizer: Any, messages: Sequence[dict[str, str]], **options: Any) -> str:
    """What the uncompiled model says to a whole chat."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)).strip()


def about(question: str, system: str | None) -> list[dict[str, str]]:
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": f"{TEXT}\n\n{question}"}]


def saying(ids: Sequence[int]) -> dict[str, Any]:
    """Arguments of ``generate`` by which the model says these tokens."""
    left = list(ids)

    def say(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(scores).index_fill_(1, torch.tensor(left.pop(0)), 1.0)

    return {"logits_processor": LogitsProcessorList([say])}


@pytest.mark.parametrize("system", [None, "Answer briefly."])
def test_a_document_is_asked_and_talked_about_as_the_whole_chat(model, fast, templated, system):
    name, tokenizer = templated
    if system is not None and name in NO_SYSTEM:
        with pytest.raises(ValueError, match="no system role"):
            Document.read(TEXT, fast, tokenizer, system=system)
        return
    document = Document.read(TEXT, fast, tokenizer, system=system)
    before = document.cache.columns
    expected = [answer(model, tokenizer, about(question, system)) for question in QUESTIONS]
    assert len(set(expected)) == len(QUESTIONS)
    assert [document.ask(question, max_new_tokens=NEW) for question in QUESTIONS] == expected
    chat, messages = document.chat(), []
    for question in QUESTIONS:
        asked = {"role": "user", "content": question} if messages else about(question, system)[-1]
        if messages and system is not None and name in MOVES_SYSTEM:
            with pytest.raises(ValueError, match="changes what comes before"):
                chat.send(question, max_new_tokens=NEW)
            break
        said = answer(model, tokenizer, [*about("", system)[:-1], *messages, asked])
        assert chat.send(question, max_new_tokens=NEW) == said
        messages += [asked, {"role": "assistant", "content": said}]
    assert document.cache.columns == before


def test_a_chat_without_a_document_goes_on_as_the_whole_chat(model, fast, templated):
    _, tokenizer = templated
    chat, messages = Chat(fast, tokenizer), []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        expected = answer(model, tokenizer, messages)
        assert chat.send(question, max_new_tokens=NEW) == expected
        messages.append({"role": "assistant", "content": expected})
    assert chat.messages == messages


@pytest.fixture
def qwen3(tokenizer: PreTrainedTokenizerFast) -> Iterator[PreTrainedTokenizerFast]:
    tokenizer.chat_template = (TEMPLATES / "qwen3.jinja").read_text()
    yield tokenizer
    tokenizer.chat_template = None


def test_options_of_the_template_are_passed_on(model, fast, qwen3):
    document = Document.read(TEXT, fast, qwen3, enable_thinking=False)
    expected = answer(model, qwen3, about(QUESTIONS[0], None), enable_thinking=False)
    assert document.ask(QUESTIONS[0], max_new_tokens=NEW) == expected
    assert expected != answer(model, qwen3, about(QUESTIONS[0], None))


def test_what_was_thought_before_is_dropped_as_the_template_says(model, fast, qwen3):
    """The cache holds thoughts of the answer before: they are taken back, or the chat is read again."""
    tokenizer = qwen3
    chat = Chat(fast, tokenizer)
    chat.send(QUESTIONS[0], max_new_tokens=NEW)
    chat.messages[-1]["content"] = "<think>\nhm\n</think>\n\nAt noon."
    messages = [*chat.messages, {"role": "user", "content": QUESTIONS[1]}]
    assert chat.send(QUESTIONS[1], max_new_tokens=NEW) == answer(model, tokenizer, messages)


def says_first(model, tokenizer, chat, gone, question, system=()):
    """The token that the model says first to a question, where nothing behind the chat so far sees forgotten tokens.

    ``gone``: the ids of the cache with all that was read, and which of them are forgotten.
    """
    (held, hidden), left = gone, chat.cache.ids[0].tolist()
    asked = [*system, *chat.messages, {"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert ids[: len(left)] == left, "the cache has the begin of the text"
    told = torch.tensor([[*held, *ids[len(left) :]]])
    seen = ~torch.tensor(hidden)[None, None, None].expand(1, model.config.num_hidden_layers, 2, -1)
    logits = MaskedOracle(model).logits(told, torch.ones_like(told), seen)
    return tokenizer.decode(logits[0, -1].argmax(), skip_special_tokens=True).strip()


@pytest.mark.parametrize("turn", [0, 1, -1])
def test_a_turn_is_forgotten(model, fast, qwen3, turn):
    system = {"role": "system", "content": "Answer briefly."}
    chat = Chat(fast, qwen3, system=system["content"])
    for question in QUESTIONS:
        chat.send(question, max_new_tokens=NEW)
    held, messages = chat.cache.ids[0].tolist(), list(chat.messages)
    place = 2 * (turn % len(QUESTIONS))
    chat.forget_turn(turn)
    assert chat.messages == messages[:place] + messages[place + 2 :]
    positions = set(chat.cache.positions.flatten().tolist())
    hidden = [position not in positions for position in range(len(held))]
    assert [token for token, is_gone in zip(held, hidden, strict=True) if not is_gone] == chat.cache.ids[0].tolist()
    expected = says_first(model, qwen3, chat, (held, hidden), "And now?", [system])
    assert chat.send("And now?", max_new_tokens=1) == expected
    assert chat.cache.forgotten == sum(hidden) > 10, "it was not read again"
    with pytest.raises(IndexError):
        chat.forget_turn(7)
    chat.send("a.", max_new_tokens=1)  # as what stands for the next message while texts are compared
    before = chat.messages[:-2]
    chat.forget_turn(-1)
    assert chat.messages == before and chat.send("a.", max_new_tokens=1) is not None


def test_thoughts_are_forgotten(model, fast, qwen3):
    chat, said = Chat(fast, qwen3), "<think>\nIt turns twice.\n</think>\n\nAt noon."
    tokens = qwen3(said, add_special_tokens=False, split_special_tokens=True).input_ids  # as of Qwen3, no special ones
    tokens += qwen3("<|im_end|>", add_special_tokens=False).input_ids
    chat.send(QUESTIONS[0], max_new_tokens=len(tokens), **saying(tokens))
    held = chat.cache.ids[0].tolist()
    chat.forget_thinking()
    assert chat.messages[-1]["content"] == "At noon."
    positions = set(chat.cache.positions.flatten().tolist())
    hidden = [position not in positions for position in range(len(held))]
    assert "twice" in qwen3.decode([token for token, is_gone in zip(held, hidden, strict=True) if is_gone])
    expected = says_first(model, qwen3, chat, (held, hidden), QUESTIONS[1])
    assert chat.send(QUESTIONS[1], max_new_tokens=1) == expected
    assert chat.cache.forgotten == sum(hidden)


def test_a_document_is_read_with_what_will_be_asked(model, qwen3):
    """What is kept is what the question wants, read behind the document as it will be."""
    fast = kvpass.compile(model, policy="snapkv", budget=40, window=8, backend="eager")
    document = Document.of_text(TEXT * 3, fast, qwen3, guide=QUESTIONS[0])
    ids = document.template.ids(document.text([{"role": "user", "content": QUESTIONS[0]}]))
    length = document.cache.columns
    assert document.cache.ids[0].tolist() == ids[:length]
    fast.set_policy("snapkv", 40 + len(ids) - length, window=len(ids) - length)
    asked = fast.compress(torch.tensor([ids]))
    kept = [[p for p in head.tolist() if 0 <= p < length] for head in asked.positions.flatten(0, 2)]
    assert kept == [head.tolist() for head in document.cache.positions.flatten(0, 2)]


def test_a_tokenizer_without_a_template_continues_the_text(model, fast, tokenizer):
    document = Document.read(TEXT, fast, tokenizer)
    for question in QUESTIONS:
        ids = tokenizer(f"{TEXT}\n\n{question}", return_tensors="pt").input_ids
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
        expected = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True).strip()
        assert document.ask(question, max_new_tokens=NEW) == expected


def test_a_chat_of_plain_text_has_nothing_before_its_first_message_to_keep(model, tokenizer):
    fast = kvpass.compile(model, policy="snapkv", budget=40, window=8, backend="eager")
    chat = Chat(fast, tokenizer)
    assert chat.send(TEXT, max_new_tokens=NEW) is not None and "protected" not in str(fast.report())


def test_an_answer_is_streamed_in_pieces(fast, qwen3):
    said = qwen3("At noon it turns.", add_special_tokens=False).input_ids
    document = Document.read(TEXT, fast, qwen3)
    stream = document.stream(QUESTIONS[0], max_new_tokens=len(said), **saying(said))
    assert list(stream) == ["At ", "noon ", "it ", "turns."]


def test_who_stops_a_stream_leaves_the_chat_as_it_was(model, fast, qwen3):
    chat = Chat(fast, qwen3)
    chat.send(QUESTIONS[0], max_new_tokens=NEW)
    before = list(chat.messages)
    stream = chat.stream(QUESTIONS[1], max_new_tokens=100)
    next(stream)
    stream.close()
    assert chat.messages == before
    expected = answer(model, qwen3, [*before, {"role": "user", "content": QUESTIONS[2]}])
    assert chat.send(QUESTIONS[2], max_new_tokens=NEW) == expected


def test_an_error_in_a_stream_is_raised_where_it_is_read(fast, qwen3):
    with pytest.raises(ValueError, match="the message is empty"):
        list(Chat(fast, qwen3).stream("  "))


def test_the_token_that_the_template_puts_behind_an_answer_ends_it_whatever_is_before_it(fast, qwen3):
    """The model itself configures no token that ends a text."""
    for before in ("", "{{- 'Speak to Anna. ' }}"):
        qwen3.chat_template = before + qwen3.chat_template
        said = qwen3("At noon.<|im_end|> Then", add_special_tokens=False).input_ids
        assert Chat(fast, qwen3).send("hi", max_new_tokens=len(said), **saying(said)) == "At noon."


def test_a_document_is_saved_with_its_text(model, fast, qwen3, tmp_path):
    document = Document.read(TEXT, fast, qwen3, system="Answer briefly.", enable_thinking=False)
    document.notes["mine"] = 1
    document.save(tmp_path / "tide.kv")
    loaded = Document.load(tmp_path / "tide.kv", fast, qwen3)
    assert loaded.notes == {"mine": 1}
    assert loaded.ask(QUESTIONS[0], max_new_tokens=NEW) == document.ask(QUESTIONS[0], max_new_tokens=NEW)
    fast.compress(torch.ones(1, 4, dtype=torch.int64)).save(tmp_path / "other.kv")
    with pytest.raises(kvpass.CacheFileError, match="without a document"):
        Document.load(tmp_path / "other.kv", fast, qwen3)


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        (" \n", ValueError, "the document is empty"),
        ("no-such-file.txt", OSError, "no-such-file.txt"),
        ("word " * 4000, ValueError, r"the document has \d+ tokens, and the model takes 2048"),
    ],
)
def test_a_document_that_cannot_be_read_is_refused_before_any_work(fast, qwen3, source, error, message):
    with pytest.raises(error, match=message):
        Document.read(source, fast, qwen3)


def test_a_question_too_long_for_the_model_is_refused(fast, qwen3):
    document = Document.read(TEXT, fast, qwen3)
    with pytest.raises(ValueError, match=r"the chat with its answer has \d+ tokens, and the model takes 2048"):
        document.ask("why? " * 1000)


def test_a_chat_stays_within_its_budget(model, qwen3):
    fast = kvpass.compile(model, policy="snapkv", budget=40, window=8, backend="eager", recompress="every_turn")
    chat = Chat(fast, qwen3)
    for turn in range(4):
        chat.send(f"{turn}: {TEXT}", max_new_tokens=NEW)
        assert int(chat.cache.lengths.max()) <= 40 + NEW
        assert len(chat.messages) == 2 * (turn + 1)
        (tokens,) = map(int, re.findall(r"of (\d+) tokens each head keeps 40 on average, as snapkv", chat.notice))
        assert chat.cache.columns - NEW < tokens <= chat.cache.columns
    assert chat.cache.columns > 300
    chat.send("And?", max_new_tokens=NEW)
    assert "each head keeps 40" in chat.notice
    with pytest.raises(ValueError, match="message is empty"):
        chat.send(" ")
    assert chat.notice == ""


def heads_without(cache, tokens):
    """How many heads lack one of the first tokens."""
    kept = [set(head) for layer in cache.positions[0].tolist() for head in layer]
    return sum(not head.issuperset(range(tokens)) for head in kept)


def test_a_chat_keeps_what_its_system_text_says_and_a_document_where_it_is_asked_to(model, qwen3):
    fast = kvpass.compile(model, policy="snapkv", budget=60, window=8, backend="eager", recompress="every_turn")
    system = "Answer in one word."
    head = len(qwen3(qwen3.apply_chat_template([{"role": "system", "content": system}], tokenize=False)).input_ids)
    chats = [Chat(fast, qwen3, system=system), Chat(fast, qwen3, system=system, protect=())]
    for turn in range(3):
        for chat in chats:
            chat.send(f"{turn}: {TEXT}", max_new_tokens=NEW)
    assert [heads_without(chat.cache, head) > 0 for chat in chats] == [False, True]
    documents = [Document.of_text(TEXT * 2, fast, qwen3, system=system, protect=p) for p in (("system",), (), [(0, 9)])]
    assert [heads_without(document.cache, head) > 0 for document in documents] == [False, True, True]
    assert heads_without(documents[2].cache, 9) == 0
    with pytest.raises(ValueError, match=r"protect=\('sytem',\): name system or tools, or give spans of tokens"):
        Document.of_text(TEXT, fast, qwen3, protect=("sytem",))
    fast.set_policy("h2o", 60, window=8)
    chat = Chat(fast, qwen3, system=system)
    chat.send(TEXT, max_new_tokens=80)
    assert heads_without(chat.cache, head) == 0


def test_the_command_says_once_what_a_turn_dropped(model, qwen3, monkeypatch):
    monkeypatch.setattr("kvpass.loading.load_model", lambda *_, **__: (model, qwen3))
    options = ("--policy", "snapkv:window=8", "--budget", "40", "--max-new-tokens", NEW, "--backend", "eager")
    result = invoke("chat", *options, stdin=f"{TEXT.replace(chr(10), ' ')}\n\n \n/quit\n".encode())
    assert result.exit_code == 0, result.output
    assert result.stderr.count("each head keeps 40 on average, as snapkv") == 1


def test_a_chat_says_nothing_of_what_it_drops_where_it_drops_nothing(fast, qwen3):
    chat = Chat(fast, qwen3)
    chat.send(TEXT, max_new_tokens=NEW)
    chat.send("And?", max_new_tokens=NEW)
    assert chat.notice == ""
