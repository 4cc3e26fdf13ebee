"""Chats about documents, as a server's front end makes tokens of them, for the templates of many models."""

from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace

import pytest

from byte_tokenizer import byte_tokenizer
from kvpass.vllm.chats import DocumentChat, named_document
from pairwise import quick

TEMPLATES = Path(__file__).parents[1] / "support" / "chat_templates"
SPECIAL = ["<|im_start|>", "<|im_end|>", "<bos>", "<s>", "<|user|>", "<|end|>", "<|start|>", "<|message|>"]
TEXT = "dusk falls at nine.\nLamps are lit then, and put out at dawn; so it was ever.\n" * 3
SYSTEM = "Answer briefly."
UNLIKE = ("deepseek", "gemma2", "gpt_oss", "mistral", "qwen3")
"""Templates that the quick suite tries: the others write turns as one of these does, with other words."""
TURNS = [
    {"role": "user", "content": "When does dusk fall?"},
    {"role": "assistant", "content": "At nine."},
    {"role": "user", "content": "¿And what is lit?"},
]
FUNCTION = {"type": "function", "function": {"name": "look", "description": "Look it up.", "parameters": {}}}


@pytest.fixture(scope="module")
def tokenizer():
    """Byte-level BPE with some special tokens."""
    return byte_tokenizer([TEXT], 350, SPECIAL, additional_special_tokens=SPECIAL)


@pytest.fixture(params=quick([path.stem for path in sorted(TEMPLATES.iterdir())], UNLIKE))
def templated(request, tokenizer):
    tokenizer.chat_template = (TEMPLATES / f"{request.param}.jinja").read_text()
    return request.param, tokenizer


def written(tokenizer, messages, **options):
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)


def tokens(tokenizer, text):
    return tokenizer(text, add_special_tokens=False).input_ids


def whole(messages, system=None):
    """A chat with the document's text."""
    first, *others = messages
    begin = [] if system is None else [{"role": "system", "content": system}]
    return [*begin, first | {"content": f"{TEXT}\n\n{first['content']}"}, *others]


def common(one, other):
    return [a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))]


def document_chat(tokenizer, system=None, **options):
    """That of a file, from texts of whole chats: what they begin with alike is before the first question."""
    texts = [
        written(tokenizer, whole([{"role": "user", "content": word}], system), **options) for word in ("When", "¿And")
    ]
    before = "".join(common(*texts))
    assert before.endswith(TEXT + "\n\n")
    ids = common(*(tokens(tokenizer, text) for text in texts))
    return DocumentChat.of("d", ids, {"document": {"before": before, "system": system, "options": options}}, tokenizer)


def rest(chat, tokenizer, messages, **options):
    """Tokens behind the document's, as the server makes them."""
    return chat.whole(written(tokenizer, chat.short(messages), **options))["prompt_token_ids"]


@pytest.mark.parametrize("turns", [1, 3])
@pytest.mark.parametrize("system", [None, SYSTEM])
def test_questions_alone_have_the_tokens_of_the_whole_chat(templated, system, turns):
    name, tokenizer = templated
    if system and name == "gemma2":
        pytest.skip("its template has no system role")
    chat, messages = document_chat(tokenizer, system), TURNS[:turns]
    if system and name == "mistral" and turns > 1:  # it writes the system text before the last message
        with pytest.raises(ValueError, match="another text than document 'd' begins with"):
            rest(chat, tokenizer, messages)
        return
    expected = tokens(tokenizer, written(tokenizer, whole(messages, system)))
    for given in (messages, whole(messages), whole(messages, system)):
        assert [*chat.ids, *rest(chat, tokenizer, given)] == expected
    parts = [{"type": "text", "text": messages[0]["content"]}]
    assert [*chat.ids, *rest(chat, tokenizer, [{"role": "user", "content": iter(parts)}, *messages[1:]])] == expected


@pytest.mark.parametrize("place", ["before", "behind"])
def test_tools_are_refused_where_the_template_writes_them_before_the_question(tokenizer, place):
    template, tools = (TEMPLATES / "smollm2.jinja").read_text(), "{% if tools %}{{ tools }}{% endif %}"
    tokenizer.chat_template = tools + template if place == "before" else template + tools
    chat = document_chat(tokenizer)
    if place == "behind":
        expected = tokens(tokenizer, written(tokenizer, whole(TURNS), tools=[FUNCTION]))
        assert [*chat.ids, *rest(chat, tokenizer, TURNS, tools=[FUNCTION])] == expected
    else:
        with pytest.raises(ValueError, match=r"another text than document 'd' begins with.* leave tools"):
            rest(chat, tokenizer, TURNS, tools=[FUNCTION])


def test_options_of_the_template_are_those_of_the_request(tokenizer):
    tokenizer.chat_template = (TEMPLATES / "qwen3.jinja").read_text()
    chat = document_chat(tokenizer)
    found = [rest(chat, tokenizer, TURNS, enable_thinking=thinking) for thinking in (False, True)]
    for ids, thinking in zip(found, (False, True), strict=True):
        text = written(tokenizer, whole(TURNS), enable_thinking=thinking)
        assert [*chat.ids, *ids] == tokens(tokenizer, text)
    assert found[0] != found[1]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "must begin with a question of the user"),
        (TURNS[1:], "must begin with a question of the user"),
        ([{"role": "user", "content": " \n"}], "must begin with a question of the user"),
        ([{"role": "user", "content": None}], "must begin with a question of the user"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "must be text"),
        ([{"role": "system", "content": "Rhyme."}, *TURNS], "was read with the system text 'Answer briefly.'"),
    ],
)
def test_a_chat_that_does_not_begin_with_a_question_is_refused(tokenizer, messages, message):
    tokenizer.chat_template = (TEMPLATES / "smollm2.jinja").read_text()
    with pytest.raises(ValueError, match=message):
        document_chat(tokenizer, SYSTEM).short(messages)


def test_a_chat_whose_tokens_differ_or_that_has_no_text_is_refused(tokenizer):
    tokenizer.chat_template = (TEMPLATES / "smollm2.jinja").read_text()
    chat = document_chat(tokenizer)
    text = written(tokenizer, chat.short(TURNS))
    assert chat.whole(text)["prompt"] == written(tokenizer, whole(TURNS))
    for ids in ([0, *chat.ids], [*chat.ids[:-1], 0], tokens(tokenizer, written(tokenizer, whole(TURNS)))):
        with pytest.raises(ValueError, match="the question changes the tokens of the end of document 'd'"):
            chat._replace(ids=ids).whole(text)
    for other in (None, "x" + text):
        with pytest.raises(ValueError, match="another text than document 'd' begins with"):
            chat.whole(other)


@pytest.mark.parametrize("state", [None, "text", {}, {"before": "a", "system": None, "options": None}])
def test_a_file_without_a_chat_begins_none(tokenizer, state):
    assert DocumentChat.of("d", [1], {} if state is None else {"document": state}, tokenizer) is None


def request(**body):
    xargs = body.pop("vllm_xargs", None)
    return SimpleNamespace(model_extra=body, vllm_xargs=xargs)


def test_a_body_names_a_document_at_its_top_or_among_the_arguments():
    assert named_document(request(other=1)) is None
    for body in ({"kvpass_document": "a"}, {"vllm_xargs": {"kvpass_document": "a"}}):
        asked = request(**body)
        assert named_document(asked) == "a" and asked.vllm_xargs == {"kvpass_document": "a"}
    asked = request(kvpass_document="a", vllm_xargs={"other": 1})
    assert named_document(asked) == "a" and asked.vllm_xargs == {"kvpass_document": "a", "other": 1}


@pytest.mark.parametrize("body", [{"kvpass_documents": "a"}, {"vllm_xargs": {"kvpass_budget": 1}}, {"kvpass": 1}])
def test_a_body_with_another_key_of_kvpass_is_refused(body):
    with pytest.raises(ValueError, match=r"kvpass\w*: kvpass does not know this argument"):
        named_document(request(**body))
