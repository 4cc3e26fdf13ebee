"""``kvpass choose``: what it measures, what it takes, the file of the choice, what it refuses."""

import copy
import json
import re

import pytest
import torch

import kvpass
from command_line import invoke
from eval_models import MODEL, TOKENIZER, model_folder
from kvpass.config import Budget
from kvpass.eval.choose import Choosing
from kvpass.eval.options import ChooseOptions
from kvpass.eval.tasks import registry

pytestmark = pytest.mark.usefixtures("compile_once")

LENGTH, ANSWER = 120, 12


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A text of words, a token each, enough for two prompts and no third."""
    words = registry()["multi_needle"].samples(TOKENIZER, 300, 1, 0)[0].context.split()
    path = tmp_path_factory.mktemp("texts") / "text.txt"
    path.write_text(" ".join(words[: 2 * (LENGTH + ANSWER) + 5]))
    return path


def options(text, **changes):
    given = {
        "model": model_folder(),
        "texts": [text],
        "policies": "snapkv:window=8,keydiff:window=8",
        "budgets": "1.0,0.2",
    }
    given |= {"entries": "model", "length": LENGTH, "max_new_tokens": ANSWER, "samples": 2, "backend": "eager"}
    return ChooseOptions(**given | changes)


@pytest.fixture(scope="module")
def measured(text, compile_once):
    """A run over two formats of entries."""
    checked = Choosing(options(text, entries="rot4,model", agreement=0.8))
    checked.run()
    return checked


@pytest.mark.parametrize("scope", ["prompt", "context"])
def test_agreement_and_divergence_are_those_of_the_plain_model_and_of_a_loop_over_tokens(text, scope):
    checked = Choosing(options(text, scope=scope))
    checked.run()
    first, *rest = TOKENIZER(text.read_text())["input_ids"]
    fast = kvpass.compile(MODEL, policy="snapkv", window=8, budget=0.2, backend="eager")
    head, piece = LENGTH - (1 if scope == "prompt" else ANSWER), LENGTH + ANSWER
    agreement, divergence = [], []
    for begin in (0, piece - 1):
        tokens = torch.tensor([[first, *rest[begin : begin + piece - 1]]])  # the special token stands before each
        with torch.no_grad():
            full = MODEL(tokens).logits[0, LENGTH - 1 : -1]
        cache = fast.compress(tokens[:, :head], reusable=False)
        logits = [fast(tokens[:, n : n + 1], past_key_values=cache).logits[0, 0] for n in range(head, piece - 1)]
        small = torch.stack(logits[-ANSWER:]).softmax(-1)
        agreement.append(sum(map(torch.equal, full.argmax(-1), small.argmax(-1))) / ANSWER)
        divergence.append(float((full.softmax(-1) * (full.softmax(-1) / small).log()).sum() / ANSWER))
    found = {(str(each.spec), each.budget): each for each in checked.conditions}
    compressed = found["snapkv:window=8", 0.2]
    assert compressed.agreement == pytest.approx(agreement)
    assert compressed.kl == pytest.approx(divergence, rel=1e-3)
    assert min(divergence) > 1e-3
    for whole in (found["full", None], found["snapkv:window=8", 1.0], found["keydiff:window=8", 1.0]):
        assert whole.agreement == [1.0, 1.0]
        assert whole.kl == pytest.approx([0.0, 0.0], abs=1e-5)


def test_prompts_are_spread_evenly_over_all_texts(text, tmp_path):
    """Each text has four pieces of 66 tokens, one of them the special token; six of the eight are taken."""
    other = tmp_path / "other.txt"
    other.write_text(" ".join(reversed(text.read_text().split())))
    pieces = []
    for path in (text, other):
        first, *rest = TOKENIZER(path.read_text())["input_ids"]
        pieces += [(first, *rest[begin : begin + 65]) for begin in range(0, 260, 65)]
    made = Choosing(options(text, texts=[text, other], length=60, max_new_tokens=6, samples=6)).prompts
    assert [(*prompt.ids, *answer) for prompt, _, answer in made] == [pieces[n] for n in (0, 1, 2, 4, 5, 6)]


def test_conditions_are_in_order_of_bytes_and_the_smallest_that_agrees_is_chosen(measured):
    sizes = [each.nbytes for each in measured.conditions]
    assert sizes == sorted(sizes) and len(sizes) == 2 * (2 * 2) + 1
    assert {each.entry_format for each in measured.conditions[:4]} == {"rot4"}
    table = measured.table(measured.choice()[0]).markdown()
    kib = [float(line.split("|")[5]) for line in table.splitlines() if re.search(r"rot4|model \|", line)]
    assert kib == sorted(kib) and len(kib) == len(sizes)
    chosen, fits = measured.choice()
    assert fits and chosen.budget == 1.0 and chosen.entry_format == "rot4"  # one token in five does not agree
    assert re.findall(r"\* \| (.*?) \|", table) == [str(chosen.spec)]


def test_the_best_that_fits_in_memory_is_chosen_or_the_smallest_named(measured, monkeypatch):
    small = [each for each in measured.conditions if each.budget == 0.2]
    largest = max(each.nbytes for each in small if each.entry_format == "model")
    monkeypatch.setattr(measured, "memory", largest)
    chosen, fits = measured.choice()
    assert fits and chosen.nbytes <= largest
    assert sum(chosen.agreement) == max(sum(x.agreement) for x in measured.conditions if x.nbytes <= largest)
    monkeypatch.setattr(measured, "memory", 9)
    assert measured.choice() == (measured.conditions[0], False)


def test_the_full_cache_itself_is_never_the_choice(measured, monkeypatch):
    monkeypatch.setattr(measured, "conditions", [each for each in measured.conditions if each.budget != 1.0])
    monkeypatch.setattr(measured, "memory", 2**30)
    assert measured.full in measured.conditions and measured.choice()[0].budget == 0.2


# --- the file of a choice --------------------------------------------------------------------------------------------


def test_compile_takes_the_file_for_these_weights_in_any_dtype_and_no_others(measured, tmp_path):
    snapkv = next(each for each in measured.conditions if each.budget == 0.2 and each.entry_format == "rot4")
    path = tmp_path / "choice.json"
    measured.save(path, snapkv)
    for dtype in (torch.float32, torch.bfloat16):
        model = copy.deepcopy(MODEL).to(dtype)
        fast = kvpass.compile(model, backend="eager", **kvpass.chosen(path, model))
        assert fast.policy == snapkv.spec.resolve() and fast.budget == Budget.parse(0.2)
        assert fast.compress(torch.ones(1, 60, dtype=torch.int64)).entry_format == "rot4"
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(2)
    with pytest.raises(
        ValueError, match=r"choice\.json' was chosen for a model with other weights: run 'kvpass choose'"
    ):
        kvpass.chosen(path, model)


@pytest.mark.parametrize("content", ["[]", "{", '{"policy": "full"}', '{"policy": "nowhere:Mine"}'])
def test_a_file_that_is_none_of_choose_is_refused(content, tmp_path):
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"other\.json' is no file of 'kvpass choose'"):
        kvpass.chosen(path, MODEL)


# --- command line ----------------------------------------------------------------------------------------------------


def test_the_command_makes_answers_of_tasks_and_prints_what_compile_takes(tmp_path):
    path = tmp_path / "new" / "choice.json"
    words = f"choose {model_folder()} --tasks multi_needle --policies full,lava:window=8,kernel_size=5 --budgets 0.5"
    words += f" --samples 2 --agreement 0.5 --length 150 --entries model --backend eager --output {path}"
    result = invoke(*words.split(), columns=200)
    assert result.exit_code == 0, result.output
    assert re.search(r"full +all +model +\d+ +100.0% +100.0%-100.0% +0.000 +0.000-0.000", result.output)
    (line,) = re.findall(r"^kvpass\.compile\(model, (.*)\)$", result.output, re.MULTILINE)
    assert line == "policy='lava', window=8, kernel_size=5, budget=0.5"
    arguments = kvpass.chosen(path, MODEL)
    assert arguments["policy"] == kvpass.policies.Lava(window=8, kernel_size=5)
    assert (arguments["budget"], arguments["entries"]) == (0.5, "model")
    full, lava = json.loads(path.read_text())["measured"][::-1]
    assert full["agreement"] == [1.0, 1.0] and max(full["kl"]) < 1e-6 and full["nbytes"] > lava["nbytes"]


@pytest.mark.parametrize("goal", ["memory='9B'", "agreement=1"])
def test_if_no_condition_meets_the_goal_the_nearest_is_named_and_no_file_is_written(text, tmp_path, goal):
    words = f"choose {model_folder()} --texts {text} --length {LENGTH} --max-new-tokens {ANSWER} --backend eager"
    words += f" --entries model --policies snapkv:window=8 --budgets 0.2 --output {tmp_path / 'choice.json'}"
    words += " --" + goal.replace("'", "")
    result = invoke(*words.split(), columns=200)
    assert result.exit_code == 2 and "snapkv:window=8" in result.stdout
    nearest = "kvpass.compile(model, policy='snapkv', window=8, budget=0.2)"
    assert result.stderr.endswith(f"error: {goal}: met by none, and nothing is written; nearest, *, is {nearest}\n")
    assert not (tmp_path / "choice.json").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"texts": None}, "give one of the two"),
        ({"tasks": "needle"}, "give one of the two"),
        ({"length": 300}, r"text .*text\.txt': has 269 tokens, 311 are needed; give a smaller length"),
        ({"length": 200}, "1 prompt: an interval needs 2"),
        ({"agreement": 0.0}, r"agreement=0\.0: must be in \(0, 1\]"),
        ({"agreement": 1.5}, r"agreement=1\.5: must be in \(0, 1\]"),
        ({"policies": "full"}, "nothing to choose from"),
        ({"memory": "512"}, "memory='512': a text is bytes and needs a unit, as in '512MiB'$"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_the_run_begins(text, changes, message):
    with pytest.raises(ValueError, match=message):
        Choosing(options(text, **changes))


def test_a_budget_that_does_not_fit_is_refused_at_the_first_prompt(text):
    with pytest.raises(ValueError, match=r"budget 0\.05 is 5 entries"):
        Choosing(options(text, budgets="0.05")).run()
