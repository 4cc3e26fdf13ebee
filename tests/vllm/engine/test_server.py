"""The plug-in behind vLLM's HTTP server, started by ``kvpass serve``; loopback only. Run by ``make test-vllm``."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing, suppress
from importlib.util import find_spec
from pathlib import Path
from random import Random

import pytest
from tiny import DOCUMENTS, answer, answers, compress_documents, prompt

if find_spec("vllm") is None:
    pytest.skip("needs vLLM: make test-vllm", allow_module_level=True)

import httpx
import openai
import psutil
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvpass

ROOM = 32
POLICY, BUDGET = "lava", 64
ABOUT = [(40, 1, "small"), (41, 9, "small"), (42, 20, "fitted")]
"""Questions about documents."""
REQUESTS, CLIENTS, RUNNING = 500, 24, 12
TEXT = 6 * "the code of bara dador is 482 913 . the old farmer carried the lamp near the river . "
CHATS = {
    "chat": [{"role": "user", "content": TEXT}, {"role": "assistant", "content": "yes"}],
    "asked of told": [{"role": "user", "content": "question the code of bara dador is"}],
    "turns about told": [
        {"role": "user", "content": "question the lamb"},
        {"role": "assistant", "content": "near the river"},
        {"role": "user", "content": "question the farmer"},
    ],
}
"""Messages, by the name of the prompt; those about "told" without the document's text."""


class Server:
    """A server and what it should answer.

    Attributes:
        expected: for each prompt, the most tokens that there is room for. documents: that a prompt is about.
    """

    def __init__(self, command, address, log, prompts, expected, documents):
        self.command, self.address, self.log = command, address, log
        self.prompts, self.expected, self.documents = prompts, expected, documents

    def start(self):
        environment = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_SERVER_DEV_MODE": "1",  # else running requests cannot be preempted over HTTP
            "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16",  # else memory grows by code for each number of tokens
        }
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                self.command, stdout=out, stderr=out, env=os.environ | environment, start_new_session=True
            )
        until = time.monotonic() + 300
        while True:
            with suppress(httpx.TransportError):
                httpx.get(self.address + "/health").raise_for_status()
                return
            assert self.process.poll() is None and time.monotonic() < until, self.log.read_text()[-4000:]
            time.sleep(1)

    def stop(self, by=signal.SIGTERM):
        with suppress(ProcessLookupError):  # it did not start: the log says why
            os.killpg(self.process.pid, by)
        self.process.wait(60)

    def ask(self, name, **options):
        return httpx.post(self.address + path_of(name), json=body(self, name, **options), timeout=120)

    def metric(self, name):
        page = httpx.get(self.address + "/metrics").text
        return sum(float(number) for number in re.findall(rf"^vllm:{name}(?:{{.*}})? (\S+)$", page, re.MULTILINE))

    def resident(self):
        """MiB of all processes of the server."""
        parent = psutil.Process(self.process.pid)
        return sum(each.memory_info().rss for each in [parent, *parent.children(recursive=True)]) >> 20


def free_port():
    with closing(socket.socket()) as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


WHOLE = ["--no-enable-chunked-prefill", "--max-num-batched-tokens", "4160"]
CHUNKS = ["--max-num-batched-tokens", "100"]
"""Prompts of up to 1,200 tokens in chunks of about 90: most requests that leave, or are preempted, do so in between."""


@pytest.fixture(scope="module")
def asked(folder, tmp_path_factory):
    """Prompts, what is answered to each, and documents, by name."""
    random = Random(0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = {str(seed): prompt(seed, random.randrange(2, 1200)) for seed in range(29)} | {"short": prompt(29, 1)}
    prompts["chat"] = tokenizer.apply_chat_template(CHATS["chat"])["input_ids"]
    found = answers(folder, [*prompts.values()], ROOM + 1, POLICY, BUDGET)
    expected = dict(zip(prompts, found, strict=True))
    place = tmp_path_factory.mktemp("documents")
    named, found, _ = compress_documents(folder, place, ABOUT, ROOM + 1)
    for seed, length, document in ABOUT:
        name = f"{length} about {document}"
        prompts[name], expected[name] = prompt(seed, length), found[str(length)][: ROOM + 1 - length]
    fast = kvpass.compile(
        AutoModelForCausalLM.from_pretrained(folder).eval(), policy="keydiff", budget=30, backend="eager"
    )
    told = kvpass.Document.of_text(TEXT, fast, tokenizer)
    told.save(place / "told.kv")
    for name in ("asked of told", "turns about told"):
        prompts[name] = tokenizer.apply_chat_template(whole(CHATS[name]))["input_ids"]
        assert prompts[name][: told.cache.columns] == told.cache.ids[0].tolist()
        rest = prompts[name][told.cache.columns :]
        expected[name] = answer(fast, rest, ROOM + 1 - len(rest), past_key_values=told.cache)
    return prompts, expected, [*named, f"told={place / 'told.kv'}"]


def whole(messages):
    """A chat about "told", with the document's text."""
    first, *others = messages
    return [first | {"content": f"{TEXT}\n\n{first['content']}"}, *others]


@pytest.fixture(scope="module", params=[WHOLE, CHUNKS], ids=["whole prompts", "chunks"])
def server(folder, asked, tmp_path_factory, request):
    (prompts, expected, named), place = asked, tmp_path_factory.mktemp("server")
    port, log = free_port(), place / "log"
    flags = {
        "--host": "127.0.0.1",
        "--port": port,
        "--served-model-name": "tiny",
        "--max-num-seqs": RUNNING,
        "--kv-cache-memory-bytes": 32 * 2**20,  # so few blocks that all are soon in memory
    }
    run = "import sys; from kvpass.cli.main import app; app(sys.argv[1:])"
    command = [sys.executable, "-c", run, "serve", folder, "--policy", POLICY, "--budget", BUDGET, "--room", ROOM]
    command += [part for document in named for part in ("--document", document)]
    command += ["--", *(part for flag in flags.items() for part in flag), *request.param]
    command = [str(part) for part in command]
    documents = {f"{length} about {document}": document for _, length, document in ABOUT}
    documents |= {name: "told" for name in CHATS if name != "chat"}
    served = Server(command, f"http://127.0.0.1:{port}", log, prompts, expected, documents)
    try:
        served.start()
        yield served
    finally:
        served.stop()


def body(server, name, **options):
    """A request for a completion; greedy and as long as there is room, if nothing else is said."""
    common = {"model": "tiny", "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    given = {"messages": CHATS[name]} if name in CHATS else {"prompt": server.prompts[name], "max_tokens": 2 * ROOM}
    if name in server.documents:
        given["vllm_xargs"] = {"kvpass_document": server.documents[name]}
    return common | given | options


def path_of(name):
    return "/v1/chat/completions" if name in CHATS else "/v1/completions"


def test_a_chat_that_names_no_max_tokens_is_answered_up_to_the_room(server):
    answer = server.ask("chat").json()
    assert answer["prompt_token_ids"] == server.prompts["chat"]
    choice = answer["choices"][0]
    assert choice["token_ids"] == server.expected["chat"] and choice["finish_reason"] == "length"


@pytest.mark.parametrize("place", [dict, lambda **given: {"vllm_xargs": given}], ids=["body", "vllm_xargs"])
def test_a_chat_protects_as_many_tokens_as_the_server_counts_in_its_system_text(server, folder, place):
    rule = [{"role": "system", "content": "the old farmer carried the lamp ."}]
    asked = {"model": "tiny", "messages": rule, "add_generation_prompt": False}
    first = httpx.post(server.address + "/tokenize", json=asked).json()["count"]
    found = server.ask("chat", messages=[*rule, *CHATS["chat"]], **place(kvpass_protect=first)).json()
    ids, [choice] = found["prompt_token_ids"], found["choices"]
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    fast = kvpass.compile(model, policy=POLICY, budget=BUDGET, backend="eager")
    expected, free = (answer(fast, ids, ROOM + 1, protect=protect) for protect in ([(0, first)], None))
    assert choice["token_ids"] == expected != free


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_tokens": 50}, "min_tokens=50: kvpass keeps room for 33 tokens; raise 'room'"),
        ({"use_beam_search": True, "n": 2}, "kvpass does not support beam search"),
        ({"vllm_xargs": {"kvpass_document": "small"}}, "tokens about document 'small': kvpass keeps room for 32"),
        ({"kvpass_document": "small"}, "tokens about document 'small': kvpass keeps room for 32"),
        ({"vllm_xargs": {"kvpass": 1}, "stream": True}, "kvpass: kvpass does not know this argument"),
        ({"vllm_xargs": {"kvpass_protect": "4"}}, "kvpass_protect='4': must be an int from 0 to "),
        ({"kvpass_document": "small", "prompt": "the lamb"}, "document 'small' begins with the token of a new prompt"),
        (
            {"kvpass_document": "told", "prompt": "<bos> farmer the lamb", "add_special_tokens": False},
            "document 'told' begins with the token of a new prompt or chat",
        ),
    ],
)
def test_what_cannot_be_answered_is_a_bad_request_that_says_why(server, options, message):
    answer = server.ask("0", **options)
    assert answer.status_code == 400 and message in answer.json()["error"]["message"]


@pytest.mark.parametrize(("_", "length", "document"), ABOUT)
def test_a_question_about_a_document_is_answered_behind_it(server, _, length, document):
    answer = server.ask(name := f"{length} about {document}").json()
    [choice], usage = answer["choices"], answer["usage"]
    assert choice["token_ids"] == server.expected[name] and choice["finish_reason"] == "length"
    assert usage["prompt_tokens"] == DOCUMENTS[document][0] + length


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=server.address + "/v1", api_key="none", max_retries=0) as found:
        yield found


def ask_in_chat(client, messages, document="told", **options):
    body = {"kvpass_document": document, "ignore_eos": True, "return_token_ids": True}
    return client.chat.completions.create(
        model="tiny", messages=messages, **{"temperature": 0, "extra_body": body} | options
    )


@pytest.mark.parametrize("written", [lambda messages: messages, whole], ids=["questions", "with the text"])
@pytest.mark.parametrize("name", ["asked of told", "turns about told"])
def test_a_chat_about_a_document_is_answered_as_the_whole_chat(server, client, name, written):
    answer = ask_in_chat(client, written(CHATS[name]), n=2, temperature=1, top_p=1e-6)
    assert answer.prompt_token_ids == server.prompts[name]
    assert [choice.token_ids for choice in answer.choices] == 2 * [server.expected[name]]
    assert answer.usage.prompt_tokens == len(server.prompts[name])
    parts = ask_in_chat(client, written(CHATS[name]), stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == answer.choices[0].message.content


FUNCTION = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"messages": [{"role": "system", "content": "the fox"}, *CHATS["asked of told"]]},
            "document 'told' was read with the system text None: leave that of the chat out",
        ),
        ({"tools": [FUNCTION], "tool_choice": "none"}, "the chat template writes another text than document 'told'"),
        (
            {"document": "small"},
            "kvpass_document='small': of the documents of this server, ['small', 'fitted', 'told'], those with a chat "
            "are ['told']: name one",
        ),
    ],
)
def test_a_chat_that_does_not_begin_as_the_document_is_a_bad_request(server, client, change, message, stream):
    with pytest.raises(openai.BadRequestError, match=re.escape(message)):
        ask_in_chat(client, **{"messages": CHATS["asked of told"], "stream": stream} | change)


class Soak:
    """Clients that each send a request when their last one is answered, or when they have left it.

    Attributes:
        seen: number of requests by kind and outcome. wrong: what differed from the prompt's answer when it is alone.
        resident: MiB of the server after each twentieth of the requests.
    """

    def __init__(self, server):
        self.server, self.random = server, Random(1)
        self.seen, self.wrong, self.resident, self.sent = Counter(), [], [], 0
        self.client = httpx.AsyncClient(base_url=server.address, timeout=120)

    async def run(self):
        async with asyncio.timeout(400), self.client:
            preempting = asyncio.create_task(self.preempt())
            await asyncio.gather(*(self.client_loop() for _ in range(CLIENTS)))
            preempting.cancel()

    async def preempt(self):
        while True:
            await asyncio.sleep(self.random.uniform(1, 4))
            answer = await self.client.post("/reset_prefix_cache", params={"reset_running_requests": True})
            answer.raise_for_status()

    async def client_loop(self):
        kinds = {self.whole: 9, self.stream: 4, self.leave: 4, self.cancel: 2, self.several: 1, self.refused: 1}
        while self.sent < REQUESTS:
            self.sent += 1
            if self.sent % (REQUESTS // 20) == 0:
                self.resident.append(self.server.resident())
            kind = self.random.choices([*kinds], [*kinds.values()])[0]
            name = self.random.choice([*self.server.prompts])
            new = self.random.randrange(1, ROOM + 8)
            self.seen[await kind(name, new)] += 1

    def check(self, name, new, choices):
        for choice in choices:
            if choice["token_ids"] != self.server.expected[name][:new]:
                self.wrong.append((name, new, choice["token_ids"]))

    async def post(self, name, status=200, **options):
        answer = await self.client.post(path_of(name), json=body(self.server, name, **options))
        assert answer.status_code == status, answer.text
        return answer.json()

    async def whole(self, name, new):
        self.check(name, new, (await self.post(name, max_tokens=new))["choices"])
        return "answered"

    async def several(self, name, new):
        """Three answers to one prompt; all are the greedy one."""
        choices = (await self.post(name, n=3, max_tokens=new, temperature=1, top_k=1))["choices"]
        assert len(choices) == 3
        self.check(name, new, choices)
        return "answered"

    async def stream(self, name, new, most=ROOM + 8):
        """Read a stream; leave it, and with it the connection, after some of its parts."""
        request, tokens = body(self.server, name, max_tokens=new, stream=True), []
        async with self.client.stream("POST", path_of(name), json=request) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    self.check(name, new, [{"token_ids": tokens}])
                    return "answered"
                if line.startswith("data: "):
                    part = json.loads(line.removeprefix("data: "))["choices"]
                    tokens += part[0].get("token_ids") or [] if part else []
                if len(tokens) >= most:
                    self.check(name, len(tokens), [{"token_ids": tokens}])
                    return "left"
        raise AssertionError(f"the stream of {name} ended without [DONE]")

    async def leave(self, name, new):
        return await self.stream(name, new, self.random.randrange(1, 10))

    async def cancel(self, name, new):
        try:
            async with asyncio.timeout(self.random.uniform(0, 1)):
                return await self.whole(name, new)
        except TimeoutError:
            return "cancelled"

    async def refused(self, name, new):
        answer = await self.post(name, status=400, min_tokens=ROOM + 2, max_tokens=2 * ROOM)
        assert "raise 'room'" in answer["error"]["message"]
        return "refused"


def test_many_requests_of_all_kinds_are_answered_as_each_alone(server):
    soak = Soak(server)
    asyncio.run(soak.run())
    until = time.monotonic() + 30
    while server.metric("num_requests_running") + server.metric("num_requests_waiting"):
        assert time.monotonic() < until, "requests of clients that have left still run"
        time.sleep(0.2)
    assert not soak.wrong and soak.seen.total() == REQUESTS
    assert soak.seen["answered"] >= 300, soak.seen
    assert min(soak.seen[kind] for kind in ("left", "cancelled", "refused")) >= 10, soak.seen
    assert server.metric("num_preemptions_total") >= 20
    assert server.metric("kv_cache_usage_perc") == 0, "a block leaked"
    assert max(soak.resident[12:]) < max(soak.resident[:12]) + 32, soak.resident  # 3 MiB were seen
    assert "Traceback" not in server.log.read_text()
    test_a_chat_that_names_no_max_tokens_is_answered_up_to_the_room(server)


def test_a_server_that_was_killed_answers_as_before_once_it_is_started_again(server):
    name, *_ = server.documents
    with httpx.stream("POST", server.address + path_of(name), json=body(server, name, stream=True)) as answer:
        next(answer.iter_lines())
        server.stop(signal.SIGKILL)
    server.start()
    test_a_chat_that_names_no_max_tokens_is_answered_up_to_the_room(server)
    for question in ABOUT:
        test_a_question_about_a_document_is_answered_behind_it(server, *question)
