"""The plug-in in vLLM on a CPU: tokens equal those of ``kvpass.compile`` and of stock vLLM. Run by ``make test-vllm``.

Each configuration has a process of its own, as vLLM keeps state in its modules.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing, suppress
from importlib.util import find_spec
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import pytest

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM: make test-vllm")

POLICIES = ["snapkv", "ada_snapkv", "pyramidkv", "lava", "lava_uniform"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("model")


def ask(name, folder, *arguments):
    """Run one function of ``scenarios.py``; return the JSON that it prints last."""
    command = [sys.executable, str(Path(__file__).parent / "scenarios.py"), name, str(folder), json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def full(folder):
    return ask("reference", folder, None, None)


@pytest.mark.parametrize("budget", [64, 128])
@pytest.mark.parametrize("policy", POLICIES)
def test_tokens_equal_kvpass_alone_together_joined_and_preempted(folder, full, policy, budget):
    expected = ask("reference", folder, policy, budget)
    assert expected != full, "a budget that changes no token shows nothing"
    found = ask("ways", folder, {"policy": policy, "budget": budget, "room": 64})
    assert found.pop("preempted") == 8
    for way, tokens in found.items():
        assert tokens == expected, way


@pytest.mark.parametrize("kvpass", [None, {"policy": "lava", "budget": 1100, "room": 64}])
def test_without_settings_or_with_a_budget_above_the_prompt_it_is_stock(folder, full, kvpass):
    found = ask("ways", folder, kvpass)
    assert found.pop("preempted") == 8
    for way, tokens in found.items():
        assert tokens == full, way


def test_a_compressed_cache_holds_many_more_requests(folder):
    peak, answers, free = ask("capacity", folder, {"policy": "lava", "budget": 64, "room": 64})
    stock_peak, _, _ = ask("capacity", folder, None)
    assert peak >= 120 and stock_peak <= 20
    assert answers == [160, 1]  # none lost, all equal
    assert free[0] == free[1]  # no block leaked


def test_many_requests_of_all_kinds_are_answered_as_each_alone(folder):
    found = ask("soak", folder, {"policy": "lava", "budget": 64, "room": 64}, 500)
    assert found["wrong"] == 0 and found["answers"] + found["cancelled"] == 500
    assert min(found["cancelled"], found["preempted"]) >= 20, "the run must show something"
    assert found["free"][0] == found["free"][1]
    assert found["resident"][-1] < found["resident"][1] + 64


@pytest.mark.parametrize("policy", ["pyramidkv", "lava"])
def test_two_processes_keep_what_one_keeps(folder, policy):
    expected = ask("reference", folder, policy, 64)
    found, preempted = ask("two_processes", folder, {"policy": policy, "budget": 64, "room": 64})
    assert found == expected and preempted == 8


def test_what_runs_on_cuda_gives_the_same_tokens_in_the_interpreter(folder, monkeypatch):
    expected = ask("reference", folder, "lava", 40, True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    found, preempted = ask("cuda_kernels", folder, {"policy": "lava", "budget": 40, "room": 16})
    assert found == expected and preempted == 3


def test_both_model_runners_take_the_plug_in(folder):
    assert ask("loaded", folder) == [True, True]


def test_engines_of_one_process_do_not_take_each_others_backend(folder, full):
    compressed = ask("reference", folder, "lava", 64)
    kvpass = {"policy": "lava", "budget": 64, "room": 64}
    assert ask("in_turn", folder, [kvpass, None, kvpass]) == [compressed, full, compressed]


def test_an_answer_ends_with_length_when_its_room_is_used_up(folder):
    assert ask("long_answer", folder, {"policy": "lava", "budget": 64, "room": 20}) == [21, "length"]


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"enable_chunked_prefill": True}, "--no-enable-chunked-prefill"),
        ({"enable_prefix_caching": True}, "--no-enable-prefix-caching"),
    ],
)
def test_flags_that_are_not_exact_are_refused_at_start(folder, options, flag):
    assert flag in ask("refused", folder, {"policy": "lava", "budget": 64, "room": 64}, options)


TEXT = "the code of bara dador is 482 913 . " + 50 * "the old farmer carried the lamp near the river . "
QUESTION = "question the code of bara dador is"
BUILTIN = Path(__file__).parents[3] / "kvpass" / "builtin"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Address of a server of the built-in model."""
    with closing(socket.socket()) as found:
        found.bind(("localhost", 0))
        port = found.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(BUILTIN), "--port", str(port)]
    command += ["--served-model-name", "needle", "--dtype", "float32", "--enforce-eager", "--max-model-len", "2048"]
    command += ["--no-enable-chunked-prefill", "--no-enable-prefix-caching", "--max-num-batched-tokens", "2304"]
    command += ["--chat-template", "{% for message in messages %}{{ message['content'] }}{% endfor %}"]
    command += ["--additional-config", json.dumps({"kvpass": {"policy": "lava", "budget": 128, "room": 32}})]
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with log.open("w") as out:
        running = subprocess.Popen(
            command, stdout=out, stderr=out, env={**os.environ, **environment}, start_new_session=True
        )
    address, until = f"http://localhost:{port}", time.monotonic() + 200
    try:
        while True:
            with suppress(URLError, ConnectionError):
                urlopen(address + "/health").close()
                break
            assert running.poll() is None and time.monotonic() < until, log.read_text()[-4000:]
            time.sleep(1)
        yield address
    finally:
        os.killpg(running.pid, signal.SIGTERM)
        running.wait(60)


def post(address, path, **body):
    request = Request(
        f"{address}/v1/{path}",
        json.dumps({"model": "needle", "temperature": 0, **body}).encode(),
        {"Content-Type": "application/json"},
    )
    with urlopen(request, timeout=120) as answer:
        return json.load(answer)["choices"][0]


def test_a_server_answers(server):
    answer = post(server, "completions", prompt=TEXT + QUESTION, max_tokens=2)
    assert answer["text"].split() == ["482", "913"]


def test_a_chat_that_names_no_max_tokens_ends_with_length(server):
    messages = [{"role": "user", "content": TEXT + QUESTION}]
    answer = post(server, "chat/completions", messages=messages, ignore_eos=True)
    assert answer["message"]["content"].split()[:2] == ["482", "913"] and answer["finish_reason"] == "length"


def test_what_cannot_be_answered_is_a_bad_request_that_says_why(server):
    with pytest.raises(HTTPError) as raised:
        post(server, "completions", prompt=TEXT, max_tokens=100, min_tokens=50)
    assert raised.value.code == 400
    assert "min_tokens=50: kvpass keeps room for 33 tokens; raise 'room'" in raised.value.read().decode()
    assert post(server, "completions", prompt=TEXT + QUESTION, max_tokens=2)["text"].split() == ["482", "913"]


def test_a_client_that_goes_away_leaves_no_block_behind(server):
    host, port = server.removeprefix("http://").split(":")
    body = json.dumps({"model": "needle", "prompt": TEXT, "max_tokens": 33, "ignore_eos": True, "stream": True, "n": 8})
    head = [
        "POST /v1/completions HTTP/1.1",
        "Host: x",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    ]
    with closing(socket.create_connection((host, int(port)))) as client:
        client.sendall("\r\n".join([*head, "", body]).encode())
        assert client.recv(64).startswith(b"HTTP/1.1 200")
    until = time.monotonic() + 30
    while True:
        with urlopen(server + "/metrics") as page:
            used = re.search(r"^vllm:kv_cache_usage_perc\S* (\S+)$", page.read().decode(), re.MULTILINE)
        if float(used[1]) == 0:
            break
        assert time.monotonic() < until, used[0]
        time.sleep(0.2)
    assert post(server, "completions", prompt=TEXT + QUESTION, max_tokens=2)["text"].split() == ["482", "913"]
