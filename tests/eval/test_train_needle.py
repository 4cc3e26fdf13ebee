"""Training of the needle model: batches, the weights it starts from, that it learns, resumes exactly and exports."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvpass.eval.tasks.needle import hide
from kvpass.eval.tasks.words import vocabulary
from needle_model import Shape, build, tokenizer
from train_needle import STAGES, Run, Stage, batch, set_cross_entropy
from training_text import Kind, Mix

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
    for name, tensor in first._asdict().items():
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


def test_twenty_steps_lower_the_loss_and_are_logged(tmp_path):
    trained = run(tmp_path)
    trained.advance()
    assert trained.done
    first, last = lines(tmp_path)
    assert [(line["step"], line["length"]) for line in (first, last)] == [(10, 32), (20, 48)]
    assert last["losses"]["filler"] < first["losses"]["filler"] - 0.3
    assert {"first", "rest", "filler"} <= set(last["losses"])


def test_rates_warm_up_and_are_linear_in_each_stage(tmp_path):
    rate = run(tmp_path)._rate
    assert [rate(step) for step in (0, 2, 11)] == pytest.approx([1 / 30, 3 / 30, 12 / 30])
    assert [rate(step) for step in (12, 16, 19)] == pytest.approx([13 / 30, 17 / 30 * 0.75, 20 / 30 * 0.5625])


def test_a_stopped_run_goes_on_bit_for_bit(tmp_path):
    whole, part = run(tmp_path / "whole"), run(tmp_path / "part")
    whole.advance()
    part.advance(steps=7)
    assert not part.done
    run(tmp_path / "part").advance(steps=6)  # over the end of the first stage
    resumed = run(tmp_path / "part")
    assert resumed.step == 13
    resumed.advance()
    expected, found = whole.model.state_dict(), resumed.model.state_dict()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert lines(tmp_path / "whole") == lines(tmp_path / "part")


def test_the_checkpoint_of_another_run_is_refused(tmp_path):
    run(tmp_path).save()
    with pytest.raises(ValueError, match=r"checkpoint.pt: seed and shape are \[1, 2, .*asked for \[2, 2"):
        run(tmp_path, seed=2)
    with pytest.raises(ValueError, match=r"are \[1, 2, .*asked for \[1, 3"):
        run(tmp_path, shape=TINY._replace(layers=3))


def test_the_exported_model_is_the_trained_one_and_answers_with_stock_transformers(tmp_path):
    trained = run(tmp_path)
    trained.advance(steps=3)
    trained.export()
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, local_files_only=True).eval()
    for name, weight in trained.model.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight.bfloat16().float()), name
    assert model.config._attn_implementation == "sdpa"
    coder = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    (text,) = hide("multikey", 120, 0)
    assert coder(text.context)["input_ids"] == tokenizer()(text.context)["input_ids"]
    assert coder.decode(coder(text.context)["input_ids"], skip_special_tokens=True) == text.context
