"""Arguments of the lm-evaluation-harness backend that are refused before anything is loaded."""

from __future__ import annotations

import pytest

pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: pip install 'kvpass[eval]'")

from kvpass.eval.harness.model import KVPassLM


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policy": "lavaa", "budget": 64}, r"policy='lavaa': did you mean 'lava'"),
        ({"policy": "lava", "budget": 64, "kernel": 3}, r"kernel=3: no argument .* did you mean 'kernel_size'"),
        ({"budgets": 64}, r"budgets=64: no argument .* did you mean 'budget'"),
        ({"policy": "full", "kernel_size": 3}, r"kernel_size=3: no argument"),
        ({"policy": "lava"}, r"budget=None: policy 'lava' needs one"),
        ({"policy": "lava", "budget": 8}, r"budget=8: must be at least window \+ 1"),
        ({"budget": 64}, r"budget=64: policy 'full' keeps everything"),
        ({"scope": "question"}, r"scope='question': must be one of 'prompt', 'context'"),
        ({"num_uncompressed_tokens": -1}, r"num_uncompressed_tokens=-1: must be an int >= 0"),
        ({"num_uncompressed_tokens": 2, "scope": "context"}, r"num_uncompressed_tokens=2: scope='context'"),
        ({"truncation": True}, r"truncation=True: must be one of 'left', 'middle'"),
        ({"compiler": "jit"}, r"compiler='jit'"),
        ({"backend": "seq2seq"}, r"backend='seq2seq'"),
        ({"parallelize": True}, r"parallelize=True: not supported"),
        ({"batch_size": "auto"}, r"batch_size='auto': must be an int"),
        ({"batch_size": 0}, r"batch_size=0: must be an int >= 1"),
        ({"batch_size": "auto:4"}, r"batch_size='auto:4': must be an int"),
    ],
)
def test_bad_arguments_are_refused_before_a_model_is_loaded(arguments, message):
    with pytest.raises(ValueError, match=message):
        KVPassLM(pretrained="no such model", **arguments)
