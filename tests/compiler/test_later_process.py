"""What one process compiled and checked serves the next one, which captures the decoder itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

START = """
import json, sys, torch, kvpass
from torch._dynamo.utils import counters
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP
from kvpass.graphs.verify import self_check

class Scaled(LlamaMLP):
    factor = float(sys.argv[1])

    def forward(self, x):
        return self.factor * super().forward(x)

checks, check = [], self_check._check
self_check._check = lambda gm: checks.append(1) or check(gm)
torch.manual_seed(0)
sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).eval()
for layer in model.model.layers:
    layer.mlp.__class__ = Scaled
fast = kvpass.compile(model, policy="lava", budget=1.0)
ids = torch.arange(200)[None] % 60
tokens = fast.generate(ids, max_new_tokens=9, do_sample=False)
assert torch.equal(tokens, model.generate(ids, max_new_tokens=9, do_sample=False))
logits = fast(ids, logits_to_keep=1).logits
assert (logits - model(ids, logits_to_keep=1).logits).abs().max() < 1e-4
missed, found = (counters["aot_autograd"][f"autograd_cache_{what}"] for what in ("miss", "hit"))
print(json.dumps([logits.tolist(), len(checks), missed, found]))
"""


def start(folder, factor):
    """What a fresh process answers; how often it made the self check, and compiled or found compiled parts."""
    own = {"KVPASS_CACHE": str(folder / "kvpass"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    env = {**os.environ, "PYTHONSAFEPATH": "1", **own}
    printed = subprocess.check_output([sys.executable, "-c", START, str(factor)], env=env, text=True)
    return json.loads(printed.splitlines()[-1])


@pytest.mark.exhaustive
def test_the_next_start_answers_alike_and_one_with_another_class_attribute_as_its_own_model_does(tmp_path):
    logits, checks, missed, found = start(tmp_path, 1.0)
    assert checks == 1 and missed > 0 and found == 0
    assert start(tmp_path, 1.0) == [logits, 0, 0, missed]
    others, checks, missed, _ = start(tmp_path, 3.0)
    assert others != logits and checks == 1 and missed > 0
