"""Answers stored by ``--use_cache``: found again by what gave them, by nothing else."""

import copy
import json

import pytest
import torch

pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: pip install 'kvpass[eval]'")
pytest.importorskip("sqlitedict")

from lm_eval.api.model import CachingLM, hash_args
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer

from harness_models import MODEL, TIGHT, TOKENIZER, build, instances

pytestmark = pytest.mark.usefixtures("compile_once")

REQUESTS = [("", " fox"), ("", " 007")]  # nothing to compress: only one small graph


def remaining(lm, path):
    """Numbers of answers, and of requests that reach the model behind the harness's cache."""
    asked, original = [], lm.loglikelihood

    def counted(requests, disable_tqdm=False):
        asked.extend(requests)
        return original(requests, disable_tqdm=True)

    lm.loglikelihood = counted
    cached = CachingLM(lm, str(path))
    try:
        return len(cached.loglikelihood(instances("loglikelihood", REQUESTS))), len(asked)
    finally:
        del lm.loglikelihood
        cached.dbdict.close()


def test_policies_do_not_share_answers_through_one_cache_file(tmp_path):
    path = tmp_path / "answers.db"
    lm, stock = build(**TIGHT), build(HFLM)
    assert remaining(lm, path) == (2, 2)
    assert remaining(lm, path) == (2, 0)
    changes = {"budget": 17, "kernel_size": 5, "num_uncompressed_tokens": 2, "truncation": "middle"}
    changes |= {"policy": "lava_uniform", "scope": "context", "max_length": 512}
    others = [*({**TIGHT, name: value} for name, value in changes.items()), {}]
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


@pytest.mark.parametrize(
    "arguments",
    [
        *({"prefix_token_id": 5}, {"softmax_dtype": "float64"}, {"add_bos_token": False}),
        *({"model": other_weights()}, {"model": other_end()}, {"tokenizer": other_words()}),
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_whatever_changes_an_answer_changes_the_key(arguments):
    assert build(**arguments).fingerprint != build().fingerprint


def test_the_source_of_a_policy_of_ones_own_changes_the_key(monkeypatch):
    before = build().fingerprint
    monkeypatch.setattr("kvpass.eval.harness.model.policy_digest", lambda policy: "edited")
    assert build().fingerprint != before


def test_a_copy_of_the_model_and_what_a_tokenizer_was_used_for_change_no_key():
    tokenizer = copy.deepcopy(TOKENIZER)
    before = build(model=copy.deepcopy(MODEL), tokenizer=tokenizer).fingerprint
    tokenizer(["the old fox", "fox"], padding=True, truncation=True, max_length=2)
    assert build(tokenizer=tokenizer).fingerprint == before
