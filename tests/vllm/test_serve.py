"""The command ``kvpass serve``: what is checked, said and started; a started server is tested by ``engine/``."""

import json
import shlex
import sys
from importlib.util import find_spec

import pytest
import torch

import kvpass
from command_line import invoke
from kvpass import builtin
from kvpass.cli import main
from kvpass.vllm import refusals
from tiny_models import tiny_model

TEMPLATE = "{% for message in messages %}<bos> {{ message['content'] }} {% endfor %}"
TEXT = 8 * "the old farmer carried the lamb near the river . "
TOKENS = 8 * 10 + 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with a chat template; beside it files of its documents and of another model's."""
    place = tmp_path_factory.mktemp("serve")
    _, tokenizer = builtin.load()
    for name, positions in (("model", 8192), ("other", 512)):
        sizes = {"vocab_size": 1344, "hidden_size": 32, "max_position_embeddings": positions}
        model = tiny_model("llama", layers=2, dtype=torch.bfloat16, **sizes)
        model.save_pretrained(place / name)
        tokenizer.chat_template = TEMPLATE if name == "model" else None
        tokenizer.save_pretrained(place / name)
        fast = kvpass.compile(model, policy="knorm", budget=0.5, entries="rot4", backend="eager")
        kvpass.Document.of_text(TEXT, fast, tokenizer).save(place / f"{name}.kv")
        if name == "model":
            fast.compress(torch.randint(5, 50, (1, 5000))).save(place / "long.kv")
    return place


@pytest.fixture
def serve(folder, monkeypatch):
    """Run the command without vLLM; returns what it prints, and the words that it would start."""
    started = []
    monkeypatch.setattr(refusals, "installed", lambda: "0.32.0")
    monkeypatch.setattr(main.os, "execv", lambda path, words: started.append([path, words]))
    monkeypatch.chdir(folder)

    def run(*words, code=0):
        result = invoke("serve", *words)
        assert result.exit_code == code, result.output
        if code:
            assert not started
            return result.output.replace("\n", " ")
        [[path, words]] = started
        assert path == words[0] == sys.executable and words[1:4] == ["-P", "-m", "vllm.entrypoints.openai.api_server"]
        return result.output.splitlines(), words[4:]

    return run


def value(words, flag):
    """What vLLM takes: the last one."""
    return words[len(words) - words[::-1].index(flag)]


def requests(lines):
    """Path and body of each curl command."""
    found = []
    for line in lines:
        if line.startswith("curl "):
            _, address, _, header, _, body = shlex.split(line)
            assert header == "Content-Type: application/json"
            found.append((address, json.loads(body)))
    return found


def test_a_document_decides_entries_dtype_and_that_each_request_names_one(serve):
    lines, words = serve("model", "--document", "m=model.kv")
    assert lines[0] == "model: only requests about documents; room 512 tokens, entries 'rot4'"
    assert lines[1] == f"document 'm': {TOKENS} tokens, 49% of the entries kept, 0.00 MiB"
    given = json.loads(value(words, "--additional-config"))
    assert given == {"kvpass": {"room": 512, "documents": ["m=model.kv"], "entries": "rot4"}}
    assert (value(words, "--model"), value(words, "--served-model-name")) == ("model", "model")
    assert (value(words, "--dtype"), value(words, "--max-model-len")) == ("bfloat16", "4096")
    assert "--enable-chunked-prefill" in words and "--no-enable-prefix-caching" in words
    [(address, body)] = requests(lines)
    assert address == "localhost:8000/v1/chat/completions" and body["kvpass_document"] == "m"
    assert body["messages"][0]["role"] == "user" and body["model"] == "model"


def test_without_a_document_prompts_are_compressed(serve):
    lines, words = serve("other", "--room", 64)
    assert lines[0] == "other: lava, 256 entries per KV head and layer; room 64 tokens, entries 'model'"
    assert "--dtype" not in words and value(words, "--max-model-len") == "512"
    given = {"policy": "lava", "budget": 256, "room": 64, "documents": [], "entries": "model"}
    assert json.loads(value(words, "--additional-config")) == {"kvpass": given}
    [(address, body)] = requests(lines)
    assert address == "localhost:8000/v1/completions" and "kvpass_document" not in body


def test_flags_of_vllm_win_and_a_long_document_makes_room_for_itself(serve):
    flags = "--port 81 --served-model-name=tiny --max_num_seqs 3 --dtype auto --no-enable-chunked-prefill".split()
    policy = ["--policy", "snapkv:kernel_size=3", "--budget", 64]
    lines, words = serve("model", "--document", "long=long.kv", "--document", "m=model.kv", *policy, "--", *flags)
    assert lines[0].startswith('model: snapkv {"kernel_size": 3}, 64 entries per KV head and layer; room 512 tokens')
    # 2500 entries of four heads, keys and values of 8 numbers in 4 bits with a scale of 4 bytes each: 160,000 bytes
    assert lines[1] == "document 'long': 5000 tokens, 50% of the entries kept, 0.15 MiB"
    assert words[-len(flags) :] == flags
    assert (value(words, "--dtype"), value(words, "--max-model-len")) == ("auto", str(5000 + 512))
    plain, about = requests(lines)
    assert plain[0] == "localhost:81/v1/chat/completions" and plain[1]["model"] == "tiny"
    assert about[0] == "localhost:81/v1/completions" and about[1]["add_special_tokens"] is False


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nosuch"], "model='nosuch': "),
        (["model", "--document", "m=nosuch.kv"], "No such file or directory: 'nosuch.kv'"),
        (["model", "--document", "model.kv"], "must be a list such as"),
        (["model", "--document", "m=other.kv"], "document 'm': the cache is of another model: its config.max_position"),
        (["model", "--document", "m=model.kv", "--entries", "int8"], "has entries='rot4', but this engine 'int8'"),
        (["model", "--document", "m=model.kv", "--budget", 9], "'policy' is missing"),
        (["model", "--document", "m=long.kv", "--", "--max-model-len", 4000], "pass a --max-model-len above 4000"),
        (["model", "--policy", "h2o"], "policy='h2o' evicts while decoding"),
        (["model", "--policy", "full"], "policy='full' keeps everything"),
        (["model", "--", "--additional-config={}"], "--additional-config is what --policy"),
    ],
)
def test_what_cannot_be_served_is_said_before_vllm_starts(serve, words, message):
    assert message in serve(*words, code=2)


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_the_command_says_how_to_get_it(folder):
    result = invoke("serve", folder / "model")
    assert (result.exit_code, result.output) == (2, "error: vLLM is not installed: pip install 'kvpass[vllm]'\n")
