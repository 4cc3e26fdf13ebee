"""Real weights (``make test-real``): SmolLM2-135M from the package index, 4-bit GGUF, dequantised, fp32.

On the CUDA device of this machine if it has one. Another model, in the folder ``KVPASS_REAL_MODEL`` (gemma-3-270m
for sliding layers), gets the test of equal tokens too.
"""

import json
import os
import re
import subprocess
import warnings
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import kvpass
from kvpass.cli.main import app
from kvpass.eval.policy_spec import parse_policies
from kvpass.eval.tasks import encode, find_tasks
from kvpass.fetch import fetch
from kvpass.loading import load_model
from kvpass.policies import Lava, SnapKV

pytestmark = pytest.mark.real

QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about rain.",
    "Name three planets.",
    "Why is the sky blue?",
    "Translate to French: good morning.",
    "What is 17 plus 25?",
    "Give me a recipe for tomato soup.",
    "Who wrote Hamlet?",
    "Explain photosynthesis in one sentence.",
    "List the days of the week.",
)
SAMPLES = 16
"""Of each task."""
GREEDY = {"do_sample": False}
PLACE = "cuda" if torch.cuda.is_available() else "cpu"
VLLM = Path(__file__).resolve().parents[2] / ".venv-vllm" / "bin" / "python"


@pytest.fixture(scope="module")
def smollm2():
    return load_model(str(fetch("smollm2-135m")), dtype="float32", device=PLACE)


def asked(tokenizer, question):
    if tokenizer.chat_template is None:
        return row(tokenizer(question).input_ids)
    return asked_in_chat(tokenizer, [{"role": "user", "content": question}])


def asked_in_chat(tokenizer, messages):
    return row(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


def row(ids):
    return torch.tensor([ids], device=PLACE)


def check_equal_tokens(model, tokenizer):
    fast = kvpass.compile(model, policy="full")
    for question in QUESTIONS:
        ids = asked(tokenizer, question)
        call = {**GREEDY, "attention_mask": torch.ones_like(ids), "max_new_tokens": 16}
        assert torch.equal(fast.generate(ids, **call), model.generate(ids, **call)), question


def test_everything_kept_gives_the_tokens_of_transformers(smollm2):
    check_equal_tokens(*smollm2)


@pytest.mark.skipif("KVPASS_REAL_MODEL" not in os.environ, reason="no folder in KVPASS_REAL_MODEL")
def test_everything_kept_gives_the_tokens_of_transformers_in_another_model():
    check_equal_tokens(*load_model(os.environ["KVPASS_REAL_MODEL"], dtype="float32", device=PLACE))


def test_answers_at_a_quarter_after_the_question_are_mostly_those_of_the_full_cache(smollm2):
    """The answers have seven digits, a token each, and the window's queries attend to the word before them.

    So scores must be pooled over more than the seven entries of the default, with which the last digits are evicted.
    """
    model, tokenizer = smollm2
    fast = kvpass.compile(model, policy="full")
    conditions = {
        "full": ("full", None),
        "snapkv": (SnapKV(kernel_size=31), 0.25),
        "lava": (Lava(kernel_size=31), 0.25),
        "snapkv by default": ("snapkv", 0.25),
        "lava by default": ("lava", 0.25),
    }
    right = dict.fromkeys(conditions, 0)
    for task in find_tasks(["niah_single_1", "niah_single_2"]):
        for sample in task.samples(tokenizer, 1024, SAMPLES, 0):
            ids = row(encode(tokenizer, sample, chat=True).ids)
            caches = fast.compress_each(ids[:, :-1], conditions=conditions.values())
            scores = {}
            for name, cache in zip(conditions, caches, strict=True):
                fast.set_policy(cache.policy, cache.budget)
                said = fast.generate(ids[:, -1:], past_key_values=cache, max_new_tokens=24, **GREEDY)
                scores[name] = task.metric(tokenizer.decode(said[0, 1:]), sample) == 1
            for name, is_right in scores.items():
                right[name] += is_right and scores["full"]
    print(f"\nright where the full cache is right: {right}, of {2 * SAMPLES} questions")
    assert right["full"] >= SAMPLES
    assert min(right["snapkv"], right["lava"]) >= 0.9 * right["full"]


@pytest.fixture(scope="module")
def answers_alone(smollm2):
    """Of 50 prompts, the arguments of ``generate`` and what the model alone says."""
    model, tokenizer = smollm2
    found = []
    for task in find_tasks(["niah_single_1", "niah_multiquery"]):
        for sample in task.samples(tokenizer, 640, 25, 0):
            ids = row(encode(tokenizer, sample, chat=True).ids)
            call = {**GREEDY, "attention_mask": torch.ones_like(ids), "max_new_tokens": 24}
            found.append((ids, call, model.generate(ids, **call)))
    return found


@pytest.mark.timeout(3600)  # 50 prompts, each read twice
@pytest.mark.parametrize("policy", ["lava:kernel_size=31", "snapkv", "streaming_llm:evict_during_decode=False"])
def test_tokens_drafted_on_a_compressed_cache_are_those_of_the_model_alone(smollm2, answers_alone, policy):
    model, tokenizer = smollm2
    fast = kvpass.compile(model, policy=parse_policies(policy)[0].resolve(), budget=0.25)
    checks, tokens = [], 0
    counting = model.register_forward_hook(lambda *_: checks.append(True))
    for ids, call, expected in answers_alone:
        found = model.generate(ids, assistant_model=fast, **call)
        assert torch.equal(found, expected), tokenizer.decode(found[0, ids.shape[1] :])
        tokens += found.shape[1] - ids.shape[1]
    counting.remove()
    accepted = tokens / len(checks) - 1  # a check gives one token more than it accepts
    print(f"\n{policy}: {len(answers_alone)} equal answers, {accepted:.2f} drafts accepted in a check")
    assert len(answers_alone) == 50 and accepted > 0


def test_saved_document_answers_as_before(smollm2, tmp_path):
    model, tokenizer = smollm2
    fast = kvpass.compile(model, policy="lava", budget=0.5)
    (task,) = find_tasks(["niah_single_2"])
    (sample,) = task.samples(tokenizer, 1024, 1, 0)
    prompt = encode(tokenizer, sample, chat=True)
    head, rest = row(prompt.head), row(prompt.rest)
    cache = fast.compress(head)
    said = fast.generate(rest, past_key_values=cache, max_new_tokens=16, **GREEDY)
    cache.save(tmp_path / "document.kv")
    loaded = kvpass.load_cache(tmp_path / "document.kv", fast)
    assert torch.equal(fast.generate(rest, past_key_values=loaded, max_new_tokens=16, **GREEDY), said)


def test_chat_of_three_turns_is_that_of_transformers(smollm2):
    model, tokenizer = smollm2
    fast, chat, cache = kvpass.compile(model, policy="full"), [], None
    for question in QUESTIONS[:3]:
        chat.append({"role": "user", "content": question})
        ids = asked_in_chat(tokenizer, chat)
        call = {**GREEDY, "attention_mask": torch.ones_like(ids), "max_new_tokens": 24}
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a turn that is appended twice is warned about
            out = fast.generate(ids, past_key_values=cache, return_dict_in_generate=True, **call)
        assert torch.equal(out.sequences, model.generate(ids, **call))
        cache = out.past_key_values
        answer = tokenizer.decode(out.sequences[0, ids.shape[1] :], skip_special_tokens=True)
        chat.append({"role": "assistant", "content": answer})


def test_demo_finds_the_facts_with_a_full_cache(smollm2, tmp_path):
    picture = tmp_path / "map.png"
    result = CliRunner().invoke(app, ["demo", "smollm2-135m", "--facts", "4", "--output", str(picture)])
    assert result.exit_code == 0, result.output
    print(result.output)
    assert picture.read_bytes().startswith(b"\x89PNG")
    systems = ("transformers", "kvpass full")
    theirs, ours = (re.findall(rf"{system} +all +(\d)/4", result.output) for system in systems)
    assert theirs == ours and int(ours[0]) >= 2, result.output


@pytest.mark.skipif(not VLLM.exists(), reason="no environment of vLLM: make test-vllm makes it")
def test_vllm_gives_the_tokens_of_generate(smollm2, tmp_path):
    model, tokenizer = smollm2
    (task,) = find_tasks(["niah_single_1"])
    prompts = [list(encode(tokenizer, sample, chat=True).ids) for sample in task.samples(tokenizer, 1024, 4, 0)]
    fast = kvpass.compile(model, policy=SnapKV(kernel_size=31), budget=256)
    call = {**GREEDY, "max_new_tokens": 12, "eos_token_id": None}
    texts = [row(ids) for ids in prompts]  # with the token of padding, which ends each message
    answers = [fast.generate(ids, attention_mask=torch.ones_like(ids), **call) for ids in texts]
    ours = [answer[0, ids.shape[1] :].tolist() for answer, ids in zip(answers, texts, strict=True)]
    settings = {"policy": "snapkv", "kernel_size": 31, "budget": 256, "room": 16}
    given = json.dumps({"kvpass": settings, "prompts": prompts, "new_tokens": 12})
    command = [VLLM, Path(__file__).parent / "vllm_answers.py", fetch("smollm2-135m")]
    ran = subprocess.run(command, input=given, capture_output=True, text=True, timeout=500)
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert json.loads(ran.stdout.splitlines()[-1]) == ours
