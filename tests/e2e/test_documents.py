"""``kvpass compress`` and ``kvpass ask``: today's answers tomorrow, in another process."""

import json
import re
from pathlib import Path

import pytest
import torch

import kvpass
from command_line import invoke
from kvpass import builtin
from kvpass.cache.cache_file import read_cache_file
from kvpass.cli.documents import load_document
from kvpass.frontends import transformers as frontend

FACTS = "the code of bara dador is 482 913 . the pin of lato gilum is 117 ."
TEXT = " ".join([FACTS, *["the old farmer carried the lamp near the river ."] * 12, "question the code of bara dador"])
QUESTIONS = [". question the pin of lato gilum is", "is", "is 482"]


pytestmark = pytest.mark.usefixtures("compile_once")


@pytest.fixture(scope="module")
def document(compile_once):
    model, tokenizer = builtin.load()
    fast = kvpass.compile(model, policy="snapkv", budget=0.6, window=6, pool="avg", backend="eager")
    document = kvpass.Document.of_text(TEXT, fast, tokenizer)
    document.notes = {"model": "builtin", "dtype": "auto"}
    return document


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "doc.txt"
    path.write_text(TEXT)
    return path


def test_a_document_in_fewer_bits_is_smaller_and_asked_as_it_was_held(text, tmp_path):
    sizes = {}
    for entries in ("model", "rot4"):
        path = tmp_path / f"{entries}.kv"
        result = invoke("compress", text, "-o", path, "--budget", "0.9", "--entries", entries, "--backend", "eager")
        assert result.exit_code == 0, result.output
        sizes[entries] = path.stat().st_size
        answer = invoke("ask", path, QUESTIONS[1], "--max-new-tokens", "6", "--backend", "eager")
        assert answer.output.strip() == "482 913 .", (entries, answer.output)
    assert sizes["rot4"] < sizes["model"] / 4
    assert load_document(path, backend="eager").cache.entry_format == "rot4"


def test_the_bytes_of_a_document_are_checked_once(document, tmp_path, monkeypatch):
    path = tmp_path / "doc.kv"
    document.save(path)
    original, opened = Path.open, []

    def counting(self, *args, **kwargs):
        opened.append(self)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", counting)
    load_document(path, backend="eager")
    assert opened.count(path) == 1


def test_the_file_says_what_it_needs_and_the_model_can_be_elsewhere(document, tmp_path):
    path = tmp_path / "doc.kv"
    document.save(path)
    notes = read_cache_file(path)[0]["notes"]
    assert (notes["model"], notes["dtype"]) == ("builtin", "auto")
    result = invoke("ask", path, "is", "--backend", "eager", "--max-new-tokens", "6", "--model", builtin.path())
    assert result.exit_code == 2 and "dtype is torch.float32, here it is" in result.output


def test_the_command_takes_options_of_a_policy(text, tmp_path):
    path = tmp_path / "new" / "doc.kv"
    result = invoke("compress", text, "-o", path, "--budget", "40", "--backend", "eager", "--policy", "lava:window=9")
    assert result.exit_code == 0, result.output
    assert "entries kept" in result.output and "written" in result.output
    metadata, tensors = read_cache_file(path)
    assert json.loads(metadata["policy"])["window"] == 9
    given = ("--budget", "40", "--backend", "eager", "--policy", "lava:window=9", "--guide", "question the code is")
    result = invoke("compress", text, "-o", path, *given)
    assert result.exit_code == 0, result.output
    guided, others = read_cache_file(path)
    assert guided["policy"] == metadata["policy"] and torch.equal(others["ids"], tensors["ids"])
    assert not torch.equal(others["store0_pool_positions"], tensors["store0_pool_positions"])


def test_standard_input_and_a_byte_order_mark_are_read_as_the_same_text(text, tmp_path):
    marked, found = tmp_path / "marked.txt", []
    marked.write_text(TEXT, encoding="utf-8-sig")
    for document, stdin in ((text, b""), (marked, b""), ("-", TEXT.encode()), ("-", TEXT.encode("utf-8-sig"))):
        path = tmp_path / "doc.kv"
        result = invoke("compress", document, "-o", path, "--budget", "40", "--backend", "eager", stdin=stdin)
        assert result.exit_code == 0, result.output
        found.append(read_cache_file(path)[1]["ids"].tolist())
    assert found == [found[0]] * 4


def test_a_file_of_python_is_asked_about_once_its_model_is_said(document, tmp_path):
    path = tmp_path / "doc.kv"
    named = document.notes
    document.notes = {}
    document.save(path)
    document.notes = named
    asked = ("ask", path, QUESTIONS[1], "--max-new-tokens", "6", "--backend", "eager")
    unnamed = invoke(*asked)
    assert unnamed.exit_code == 2 and "names no model; say which it is: kvpass ask FILE" in unnamed.output
    assert invoke(*asked, "--model", "builtin").output.strip() == "482 913 ."
    page = tmp_path / "kept.html"
    assert invoke("look", path, "-o", page, "--model", "builtin").exit_code == 0 and page.exists()


def test_mistakes_are_one_line_and_exit_code_2(document, text, tmp_path):
    path, damaged, empty, binary = (tmp_path / name for name in ("doc.kv", "damaged.kv", "empty.txt", "binary.txt"))
    document.save(path)
    for file, content in ((damaged, path.read_bytes()[:-1]), (empty, b""), (binary, b"\xff\xfe\x00")):
        file.write_bytes(content)
    before = path.read_bytes()
    for words, message in [
        (("ask", damaged, "is"), "truncated"),
        (("ask", text, "is"), "no cache file"),
        (("ask", path, ""), "message is empty"),
        (("ask", path, "is", "--model", tmp_path / "nowhere"), "nowhere"),
        (("compress", empty, "-o", path), "document is empty"),
        (("compress", binary, "-o", path), "is no UTF-8 text"),
        (("compress", text, "-o", path, "--policy", "lavaa"), "did you mean 'lava'"),
        (("compress", text, "-o", path, "--backend", "eager", "--guide", "code"), "guide with policy 'kvzip'"),
        (("compress", text, "-o", path, "--policy", "lava,snapkv"), "name one"),
        (("compress", text, "-o", path, "--entries", "int4"), "entries='int4'"),
        (("compress", text, "-o", path, "--policy", "lava", "--budget", "0.01", "--backend", "eager"), "window + 1"),
    ]:
        result = invoke(*words)
        assert result.exit_code == 2, (words, result.output, result.exception)
        assert "error: " in result.output and message in result.output, (words, result.output)
        assert path.read_bytes() == before


def test_a_chat_goes_on_from_line_to_line_until_quit(document, tmp_path):
    path = tmp_path / "doc.kv"
    document.save(path)
    lines = [QUESTIONS[1], " ", "is", "/quit", "never read"]
    typed = "\n".join(lines).encode()
    result = invoke("chat", path, "--backend", "eager", "--max-new-tokens", "6", stdin=typed)
    chat = document.chat()
    expected = [chat.send(line, max_new_tokens=6) for line in (lines[0], lines[2])]
    assert result.exit_code == 0, result.output
    shown = [line.removeprefix("> ").strip() for line in result.stdout.splitlines()]
    assert shown == [expected[0], "", expected[1], ""]
    assert invoke("chat", path, "--system", "x", "--backend", "eager").exit_code == 2


def test_look_writes_the_page_of_a_document_and_loads_no_weights(document, text, tmp_path, monkeypatch):
    path, page = tmp_path / "doc.kv", tmp_path / "new" / "kept.html"
    document.save(path)
    expected = load_document(path, backend="eager").html()
    monkeypatch.setattr("kvpass.cli.documents.load_model", None)
    result = invoke("look", path, "-o", page)
    assert result.exit_code == 0, result.output
    assert f"written: {page}" in result.output.replace("\n", "")
    assert page.read_text() == expected
    page.unlink()
    for words, message in ((text,), "no cache file"), ((path, "--model", tmp_path / "nowhere"), "nowhere"):
        result = invoke("look", *words, "-o", page)
        assert result.exit_code == 2 and message in result.stderr, result.output
        assert not page.exists()


def test_a_question_that_is_not_known_yet_is_spoken_of_before_the_work(text, tmp_path):
    frontend._warn_of_question.cache_clear()  # other tests have had it say so
    for policy, words in (("lava", "'lava' goes by it"), ("kvzip", "reads the text twice"), ("compactor", "")):
        options = ("--policy", policy, "--budget", "40", "--backend", "eager")
        said = invoke("compress", text, "-o", tmp_path / "doc.kv", *options).stderr
        assert words in said and said.count("not known yet") == bool(words), said


def test_reading_says_how_many_tokens_it_has_read_where_there_is_no_terminal(text, tmp_path, monkeypatch):
    monkeypatch.setattr("kvpass.progress.LINE_SECONDS", 0.001)
    said = invoke("compress", text, "-o", tmp_path / "doc.kv", "--backend", "eager").stderr
    (tokens,) = set(re.findall(r"kvpass: \d+ of (\d+), tokens read", said))
    read = [int(count) for count in re.findall(r"kvpass: (\d+) of \d+, tokens read", said)]
    assert int(tokens) == load_document(tmp_path / "doc.kv", backend="eager").cache.columns
    assert read == sorted(read) and len(set(read)) > 1
