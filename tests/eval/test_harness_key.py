"""Answers stored by ``--use_cache``: found again by what gave them, by nothing else."""

from __future__ import annotations

import copy
import json

import pytest
import torch

pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: pip install 'kvpass[eval]'")
pytest.importorskip("sqlitedict")

from lm_eval.api.instance import Instance
from lm_eval.api.model import CachingLM, hash_args
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer

from kvpass import builtin
from kvpass.eval.harness.model import KVPassLM
from tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("compile_once")

TIGHT = {"policy": "lava", "budget": 16, "window": 6}
TOKENIZER = builtin.load()[1]
MODEL = tiny_model("llama", num_hidden_layers=1, vocab_size=len(TOKENIZER), eos_token_id=4)
REQUESTS = [("", " fox"), ("", " 007")]  # nothing to compress: only one small graph


def build(model=MODEL, tokenizer=TOKENIZER, **arguments):
    return KVPassLM(pretrained=model, tokenizer=tokenizer, compiler="eager", **arguments)


def remaining(lm, path):
    """Numbers of answers, and of requests that reach the model behind the harness's cache."""
    asked, original = [], lm.loglikelihood
    requests = [Instance("loglikelihood", {}, given, index) for index, given in enumerate(REQUESTS)]

    def counted(requests, disable_tqdm=False):
        asked.extend(requests)
        return original(requests, disable_tqdm=True)

    lm.loglikelihood = counted
    cached = CachingLM(lm, str(path))
    try:
        return len(cached.loglikelihood(requests)), len(asked)
    finally:
        del lm.loglikelihood
        cached.dbdict.close()


def test_policies_do_not_share_answers_through_one_cache_file(tmp_path):
    path = tmp_path / "answers.db"
    lm, stock = build(**TIGHT), HFLM(pretrained=MODEL, tokenizer=TOKENIZER)
    assert remaining(lm, path) == (2, 2)
    assert remaining(lm, path) == (2, 0)
    others = [
        {**TIGHT, "budget": 17},
        {**TIGHT, "kernel_size": 5},
        {**TIGHT, "num_uncompressed_tokens": 2},
        {**TIGHT, "truncation": "middle"},
    ]
    others += [{**TIGHT, "policy": "lava_uniform"}, {**TIGHT, "scope": "context"}, {}, {**TIGHT, "max_length": 512}]
    keys = {build(**arguments).fingerprint for arguments in others}
    assert len(keys | {lm.fingerprint}) == len(others) + 1
    assert build(**TIGHT, batch_size=2).fingerprint == lm.fingerprint
    other = build(**others[0])
    assert remaining(other, path) == (2, 2)
    assert remaining(stock, path) == (2, 2)
    assert remaining(stock, path) == (2, 0)
    cached = CachingLM(stock, str(path))
    assert hash_args("loglikelihood", REQUESTS[0]) in cached.dbdict
    cached.dbdict.close()


def other_weights():
    model = copy.deepcopy(MODEL)
    with torch.no_grad():
        model.lm_head.weight.add_(1)
    return model


def other_words():
    """Two words in each other's place."""
    whole = json.loads(TOKENIZER.backend_tokenizer.to_str())
    words = whole["model"]["vocab"]
    words["fox"], words["crow"] = words["crow"], words["fox"]
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(whole))
    return tokenizer


def other_end():
    model = copy.deepcopy(MODEL)
    model.generation_config.eos_token_id = [4, 5]
    return model


def test_models_do_not_share_answers_through_one_cache_file(tmp_path):
    path = tmp_path / "answers.db"
    assert remaining(build(**TIGHT), path) == (2, 2)
    assert remaining(build(other_weights(), **TIGHT), path) == (2, 2)
    assert remaining(build(tokenizer=other_words(), **TIGHT), path) == (2, 2)
    assert remaining(build(copy.deepcopy(MODEL), copy.deepcopy(TOKENIZER), **TIGHT), path) == (2, 0)


@pytest.mark.parametrize(
    "arguments",
    [{"prefix_token_id": 5}, {"softmax_dtype": "float64"}, {"add_bos_token": False}, {"model": other_end()}],
    ids=lambda arguments: next(iter(arguments)),
)
def test_whatever_changes_an_answer_changes_the_key(arguments):
    assert build(**arguments).fingerprint != build().fingerprint


def test_the_source_of_a_policy_of_ones_own_changes_the_key(monkeypatch):
    before = build().fingerprint
    monkeypatch.setattr("kvpass.eval.harness.model.policy_digest", lambda policy: "edited")
    assert build().fingerprint != before


def test_a_folder_is_known_by_what_is_in_it(tmp_path):
    TOKENIZER.save_pretrained(tmp_path)
    found = []
    for model in (MODEL, MODEL, other_weights()):
        model.save_pretrained(tmp_path)
        found.append(KVPassLM(pretrained=str(tmp_path), device="cpu").fingerprint)
    assert found[0] == found[1] != found[2]


def test_what_a_tokenizer_was_used_for_changes_no_key():
    tokenizer = copy.deepcopy(TOKENIZER)
    before = build(tokenizer=tokenizer).fingerprint
    tokenizer(["the old fox", "fox"], padding=True, truncation=True, max_length=2)
    assert build(tokenizer=tokenizer).fingerprint == before
