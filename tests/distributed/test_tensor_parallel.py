"""A model on several processes keeps what it keeps on one device, and gives the same tokens."""

import functools
import inspect
import itertools
import json
from collections.abc import Callable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch

import divided_model as divided
import kvpass
import tiny_models
from divided_model import KVZAP, command, compare_dialogues, compare_entries, dialogue, small_builtin
from kvpass.adapt.latent_attention import attend_latents
from kvpass.cli.documents import load_document
from kvpass.loading import load_model
from processes import Processes
from tiny_models import tiny_model, write_kvzap
from versions import DIVIDED

ROOT = Path(__file__).resolve().parents[2]
pytestmark = DIVIDED
LATENT = ["deepseek_v3", "youtu", "deepseek_v2", "minicpm3"]
FURTHER = ["mixtral", "phi3", "qwen2", "olmo2", "phi", "starcoder2", "granite", "gpt_neox", "diffllama"]
FURTHER += ["llama4", "gpt_oss", "gemma2", "cohere2", "smollm3"]

Folders = Callable[..., Path]


@pytest.fixture(scope="module")
def groups() -> Iterator[Callable[[int], Processes]]:
    """Processes by their number."""
    started: dict[int, Processes] = {}

    def group(size: int) -> Processes:
        return started.setdefault(size, Processes(size))

    yield group
    for processes in started.values():
        processes.end()


@pytest.fixture(scope="module")
def two(groups: Callable[[int], Processes]) -> Processes:
    return groups(2)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Folders with tiny models of so many heads that four processes can share them."""

    @functools.cache
    def folder(family: str, layers: int | None = None, kv_heads: int = 4, **given: Any) -> Path:
        made = tmp_path_factory.mktemp(family)
        layers = layers or (3 if family == "gemma3" else 2)  # of which the first has a sliding window
        model = tiny_model(family, layers=layers, num_attention_heads=8, num_key_value_heads=kv_heads, **given)
        model.save_pretrained(made)
        full = layers - (family == "gemma3")
        write_kvzap(made / KVZAP, full, kv_heads, model.config.hidden_size)
        return made

    return folder


def compare(processes: Processes, folder: Path, policy: str, *, of_one: dict[str, Any] | None = None, **given: Any):
    """Several processes against one device, which is compiled with ``of_one``; None: as the processes."""
    own = functools.partial(dialogue, folder, policy, **(given if of_one is None else of_one))
    compare_dialogues(*processes.run_beside(own, dialogue, folder, policy, **given))


@pytest.mark.parametrize("policy", ["lava", "tova"])
def test_two_processes_keep_what_one_device_keeps(policy, two, folder_of):
    compare(two, folder_of("llama", layers=1), policy)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("size", "family", "policy", "given"),
    [
        *itertools.product([2], ["llama", "qwen3", "gemma3", "qwen3_moe"], sorted(kvpass.POLICIES), [{}]),
        *itertools.product([4], ["llama", "qwen3"], ["lava", "tova", "layer_defensivekv"], [{}]),
        *((2, family, "lava", {}) for family in FURTHER),
        *((2, "llama", policy, {"recompress": "every_turn"}) for policy in ("lava", "pyramidkv", "ada_snapkv")),
        *((2, "llama", "lava", {"entries": entries}) for entries in ("int8", "fp8", "rot4", "rot2")),
        *((2, family, policy, {"compact": True}) for family, policy in (("llama", "kvzip"), ("gpt_oss", "lava"))),
        *((2, "gemma3", policy, {"compile_regions": False}) for policy in ("lava", "cake", "layer_defensivekv")),
        (2, "llama", "lava", {"backend": "inductor", "compile_regions": True}),
        (2, "gemma3", "lava", {"backend": "inductor", "compile_regions": False}),
    ],
)
def test_processes_keep_the_same(size, family, policy, given, groups, folder_of):
    """Graphs in parts and not, and compiled code, as one device in parts."""
    sizes, of_one = {"head_dim": 32} if "entries" in given else {}, {} if "compile_regions" in given else None
    compare(groups(size), folder_of(family, **sizes), policy, of_one=of_one, **given)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", [family for family in LATENT if family in tiny_models.FAMILIES])
def test_latents_are_the_same(family, two, folder_of, monkeypatch):
    """Those of heads that processes share are expanded: so they are on one device here."""
    if family in LATENT[2:]:
        expand = functools.partial(attend_latents, divided=True)
        monkeypatch.setattr("kvpass.adapt.copied.attend_latents", lambda model, divided: expand(model))
    compare(two, folder_of(family, kv_heads=8), "lava")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "policy", "given"),
    [
        *(("llama", policy, {}) for policy in ("lava", "h2o", "tova", "r_kv", "triattention", "kvzap")),
        ("llama", "lava", {"entries": "rot4"}),
        ("gpt_oss", "lava", {}),
    ],
)
def test_a_file_of_some_processes_is_continued_on_any_number(family, policy, given, groups, folder_of, tmp_path):
    pairs = [(2, 1), (1, 2)]
    if (family, given) == ("llama", {}):
        pairs += [(2, 4), (4, 1), (4, 2), (1, 4)] if policy == "lava" else [(2, 4)]
    folder = folder_of(family, head_dim=32) if given else folder_of(family)
    entries = divided.saved(folder, policy, tmp_path / "1.kv", **given)
    expected, logits = divided.continued(folder, policy, tmp_path / "1.kv", **given)
    compare_entries([expected], entries)
    for size in sorted({name for name, _ in pairs} - {1}):
        compare_entries(groups(size).run(divided.saved, folder, policy, tmp_path / f"{size}.kv", **given), entries)
    for name, size in pairs:
        run = functools.partial(divided.continued, folder, policy, tmp_path / f"{name}.kv", **given)
        parts = [run()] if size == 1 else groups(size).run(run)
        compare_entries([found for found, _ in parts], entries)
        for _, found in parts:
            torch.testing.assert_close(found, logits, atol=1e-4, rtol=0)


@pytest.mark.exhaustive
def test_what_one_process_refuses_or_cannot_write_all_refuse(two, folder_of, tmp_path):
    two.run(divided.agree_on_arguments, folder_of("llama"))
    two.run(divided.saved_where_nothing_can_be, folder_of("llama"), tmp_path / "missing" / "cache.kv")
    folder = folder_of("llama", layers=1)  # and what it could not compile all go on after
    compare_dialogues(two.run(divided.agree_on_captures, folder), dialogue(folder, "lava"))


@pytest.mark.exhaustive
def test_evaluation_on_two_processes_answers_what_it_answers_on_one(two, tmp_path):
    model = small_builtin(tmp_path / "model")
    given = f"eval {model} --tasks multi_needle --policies lava,tova --budgets 0.4 --samples 2 --length 150 --output"
    own, shared = ([*given.split(), str(tmp_path / name), "--backend", "eager"] for name in ("one", "two"))
    said, _ = two.run_beside(functools.partial(command, *own), command, *shared)
    assert [text.count("written:") for text in said] == [1, 0]
    one, two_of = (  # one process answers a prompt under all policies at once, several under one after the other
        sorted(map(json.loads, (tmp_path / folder / "samples.jsonl").read_text().splitlines()), key=itemgetter("key"))
        for folder in ("one", "two")
    )
    for record in (*one, *two_of):
        record["kept"].pop("cache_bytes")  # tables of each process
    assert one == two_of


@pytest.mark.exhaustive
def test_a_document_that_two_processes_compress_is_asked_on_one_and_on_two(two, tmp_path):
    text = "the code of bara dador is 482 913 . " + 20 * "the old farmer carried the lamp near the river . "
    (tmp_path / "document.txt").write_text(text)
    model, file = str(small_builtin(tmp_path / "model")), str(tmp_path / "document.kv")
    given = [str(tmp_path / "document.txt"), "--output", file, "--model", model, "--policy", "lava", "--budget", "64"]
    said = two.run(command, "compress", *given, "--backend", "eager")
    assert [printed.count("written:") for printed in said] == [1, 0]
    question, how = "question the code of bara dador is", ("--max-new-tokens", "3", "--backend", "eager")
    loaded, tokenizer = load_model(model, dtype="auto", device="cpu")
    alone = kvpass.compile(loaded, policy="lava", budget=64, backend="eager")
    expected = kvpass.Document.of_text(text, alone, tokenizer).ask(question, max_new_tokens=3)
    assert load_document(file, backend="eager").ask(question, max_new_tokens=3) == expected
    said = two.run(command, "ask", file, question, *how)
    assert [printed.splitlines() for printed in said] == [[expected], []]


@pytest.mark.exhaustive
def test_the_example_prints_what_its_docstring_shows(two):
    example = ROOT / "examples" / "tensor_parallel.py"
    shown = inspect.cleandoc(example.read_text().split("Prints::\n\n")[1].split('"""')[0])
    assert [printed.strip() for printed in two.run(divided.printed_by, example)] == [shown, ""]
