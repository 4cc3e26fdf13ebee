"""Training of the needle model: batches, the weights it starts from, that it learns, resumes exactly and exports."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvpass
from kvpass.eval.experiments.needle_accuracy import answer, measure
from kvpass.eval.needle.model import Shape, build, tokenizer
from kvpass.eval.needle.text import sample
from kvpass.eval.needle.train import STAGES, Run, Stage, batch, set_cross_entropy
from kvpass.eval.needle.training_text import Kind, Mix
from kvpass.eval.needle.words import vocabulary

TINY = Shape(layers=2, hidden=64, heads=4, feed_forward=64)
FACTS = Mix(copies=0.3, lists=0, variables=0, short=1, density=(0.7, 1), attributes=1, clash=0, two=0, decoys=0)
SHORT = (Stage(32, 12, 512, FACTS, gaps=0.3), Stage(48, 8, 512, FACTS, gaps=0.3, rate=(1.0, 0.5)))


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(folder, **changes):
    return Run(folder, **{"stages": SHORT, "shape": TINY, "seed": 1, "compiled": False, **changes})


def lines(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_a_batch_depends_on_seed_and_step_alone():
    first, again = batch(STAGES[1], 0, 3), batch(STAGES[1], 0, 3)
    for name, tensor in vars(first).items():
        assert torch.equal(tensor, getattr(again, name)), name
        assert tensor.shape[:2] == (32, 128) and tensor.dtype == torch.int64, name
    assert not torch.equal(first.ids, batch(STAGES[1], 0, 4).ids)
    assert not torch.equal(first.ids, batch(STAGES[1], 1, 3).ids)


def test_positions_jump_only_at_sentence_starts_and_stay_in_reach():
    stage = dataclasses.replace(STAGES[2], gaps=1.0, mix=Mix(copies=0.0))
    texts = batch(stage, 0, 0)
    ids, positions = texts.ids, texts.positions
    jumps = positions[:, 1:] - positions[:, :-1]
    stop = vocabulary().index(".")
    assert jumps.min() == 1
    assert set(ids[:, :-1][jumps > 1].tolist()) <= {stop, vocabulary().index("<bos>")}
    assert ((jumps > 1).sum(1) <= 5).all()
    assert (jumps > 1).any(1).float().mean() > 0.9
    assert positions.max() < stage.reach
    assert positions.max() > stage.reach / 2
    still = batch(dataclasses.replace(stage, gaps=0.0), 0, 0).positions
    assert torch.equal(still, torch.arange(256).expand(16, 256))


def test_a_part_of_the_filler_is_left_out_and_nothing_else():
    stage = dataclasses.replace(STAGES[2], tokens=16384)
    kinds = batch(stage, 0, 0).kinds
    assert 0.05 < (kinds == Kind.FILLER).float().mean() < 0.3
    assert (kinds == Kind.FIRST).sum() > 100
    assert (kinds == Kind.VARIABLE).sum() > 50
    assert (kinds == Kind.LIST).sum() > 50


def test_any_value_of_a_list_that_is_still_to_come_is_right():
    texts = batch(Stage(128, 1, 4096, Mix(copies=0.0, lists=1.0, density=(0.5, 1))), 0, 0)
    words = vocabulary()
    answers = 0
    for ids, kinds, others in zip(texts.ids, texts.kinds, texts.others, strict=True):
        said = [words[i] for i in ids]
        for i, kind in enumerate(kinds):
            also = [words[j] for j in others[i] if j >= 0]
            if kind != Kind.LIST or said[i] in (",", "."):
                assert not also
                continue
            end = said.index(".", i) if "." in said[i:] else None
            if end is not None:
                assert also == [word for word in said[i + 1 : end] if word != ","]
                answers += len(also)
    assert answers > 20


def test_the_loss_of_a_set_is_that_of_all_its_members():
    logits = torch.randn(3, 7, generator=torch.Generator().manual_seed(0))
    right = torch.tensor([[2, -1, -1], [0, 4, -1], [1, 3, 6]])
    shares = logits.softmax(-1)
    expected = [-sum(row[i] for i in members if i >= 0).log() for row, members in zip(shares, right, strict=True)]
    torch.testing.assert_close(set_cross_entropy(logits, right), torch.stack(expected))
    alone = torch.nn.functional.cross_entropy(logits, right[:, 0], reduction="none")
    torch.testing.assert_close(set_cross_entropy(logits, right[:, :1]), alone)


@pytest.mark.parametrize("shape", [Shape(), TINY])
def test_the_first_layer_starts_by_looking_back_and_the_second_by_copying(shape):
    model = build(shape, 0)
    model.set_attn_implementation("eager")
    words = torch.randperm(1000, generator=torch.Generator().manual_seed(0))[:40] + 300
    with torch.no_grad():
        out = model(torch.cat([words, words])[None], output_attentions=True, use_cache=False)
    for head in range(shape.heads - 1):
        looked = out.attentions[0][0, head].diagonal(-(head + 1))
        assert looked[head:].mean() > 0.6, f"head {head}"
    assert out.attentions[1][0, 0].diagonal(-39)[3:].mean() > 10 / 80  # one past the same word, 40 back
    if shape is TINY:  # its output layer is too small for more than a trace of the copy
        return
    losses = torch.nn.functional.cross_entropy(out.logits[0, :-1], torch.cat([words, words])[1:], reduction="none")
    assert losses[42:].mean() < losses[:39].mean() - 0.3


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"layers": 1}, "layers=1"), ({"heads": 1}, "heads=1"), ({"hidden": 100, "heads": 8}, "hidden=100")],
)
def test_a_shape_that_cannot_start_by_copying_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Shape(**changes)


def test_twenty_steps_lower_the_loss_and_are_logged(tmp_path):
    trained = run(tmp_path)
    trained.advance()
    assert trained.done
    assert (trained.at.step, trained.at.stage, trained.at.tokens) == (20, 2, 12 * 512 + 8 * 480)
    first, last = lines(tmp_path)
    assert (first["step"], last["step"]) == (10, 20)
    assert last["now"]["filler"] < first["now"]["filler"] - 0.3
    assert {"first", "rest", "filler"} <= set(last["now"])


def test_a_stopped_run_goes_on_bit_for_bit(tmp_path):
    whole, part = run(tmp_path / "whole"), run(tmp_path / "part")
    whole.advance()
    part.advance(steps=7)
    assert not part.done
    run(tmp_path / "part").advance(steps=6)  # over the end of the first stage
    resumed = run(tmp_path / "part")
    assert (resumed.at.stage, resumed.at.stage_step, resumed.at.step) == (1, 1, 13)
    resumed.advance()
    expected, found = whole.model.state_dict(), resumed.model.state_dict()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert whole.at.first == resumed.at.first
    a, b = lines(tmp_path / "whole"), lines(tmp_path / "part")
    assert [line["now"] for line in a] == [line["now"] for line in b]


def test_the_checkpoint_of_another_run_is_refused(tmp_path):
    run(tmp_path).save()
    with pytest.raises(ValueError, match=r"checkpoint.pt: seed 1, .*asked for 2"):
        run(tmp_path, seed=2)
    with pytest.raises(ValueError, match=r"'layers': 2.*layers=3"):
        run(tmp_path, shape=dataclasses.replace(TINY, layers=3))


def test_the_exported_model_is_the_trained_one_and_answers_with_stock_transformers(tmp_path):
    trained = run(tmp_path)
    trained.advance(steps=3)
    trained.export()
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, local_files_only=True).eval()
    for name, weight in trained.model.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight.bfloat16().float()), name
    assert model.config._attn_implementation == "sdpa"
    coder = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    text = sample("multikey", 120, 0)
    assert coder(text.context)["input_ids"] == tokenizer()(text.context)["input_ids"]
    assert coder.decode(coder(text.context)["input_ids"], skip_special_tokens=True) == text.context
    found = measure(model, coder, "multiquery", 160, 2)
    assert found.questions == 8
    assert 0 <= found.right < 8


def test_accuracy_counts_whole_answers():
    """A model that says what it is told to: every question right but those of the second text."""

    class Oracle:
        device = torch.device("cpu")

        def generate(self, input_ids, max_new_tokens, **_):
            rows = []
            for row in input_ids:
                prompt = coder.decode(row, skip_special_tokens=True)
                (text,) = [text for text in texts if prompt.startswith(text.context)]
                (question,) = [question for question in text.questions if prompt.endswith(question.text)]
                asked = prompt.removeprefix(text.context)
                assert asked.count(" .") == asked.count("question") - 1, "each question but the last is answered"
                said = " , ".join(question.answers) if text is not texts[1] else "000"
                new = coder(said + " .", add_special_tokens=False)["input_ids"][:max_new_tokens]
                rows.append([*row.tolist(), *new, *[0] * (max_new_tokens - len(new))])
            return torch.tensor(rows)

    coder = tokenizer()
    for task, questions in (("single", 1), ("multivalue", 1), ("multiquery", 4)):
        texts = [sample(task, 150, seed) for seed in range(3)]
        found = measure(Oracle(), coder, task, 150, 3)
        assert (found.right, found.questions) == (2 * questions, 3 * questions)


def test_a_compressed_model_says_its_first_token_from_the_compressed_cache():
    """Random weights: with every entry kept the first tokens are the plain model's, with few kept they are not."""
    coder, model = tokenizer(), build(TINY, 0).eval()
    torch.nn.init.normal_(model.lm_head.weight)  # as built it repeats the last word, whatever the cache holds
    prompts = [text.ask(text.questions[0]) for text in (sample("multikey", 200, seed) for seed in range(6))]
    plain = answer(model, coder, prompts, 1)
    assert answer(kvpass.compile(model, policy="full", backend="eager"), coder, prompts, 1) == plain
    few = kvpass.compile(model, policy="streaming_llm", budget=8, backend="eager")
    assert answer(few, coder, prompts, 1) != plain
