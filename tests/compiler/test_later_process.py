"""What one process compiled serves the next one, which captures the decoder itself."""

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

class Scaled(LlamaMLP):
    factor = float(sys.argv[1])

    def forward(self, x):
        return self.factor * super().forward(x)

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
print(json.dumps([logits.tolist(), missed, found]))
"""


def start(folder, factor):
    """What a fresh process answers; how many compiled parts it made, or found."""
    env = {**os.environ, "PYTHONSAFEPATH": "1", "TORCHINDUCTOR_CACHE_DIR": str(folder)}
    printed = subprocess.check_output([sys.executable, "-c", START, str(factor)], env=env, text=True)
    return json.loads(printed.splitlines()[-1])


@pytest.mark.exhaustive
def test_the_next_start_answers_alike_and_one_with_another_class_attribute_as_its_own_model_does(tmp_path):
    logits, missed, found = start(tmp_path, 1.0)
    assert missed > 0 and found == 0
    assert start(tmp_path, 1.0) == [logits, 0, missed]
    others, missed, _ = start(tmp_path, 3.0)
    assert others != logits and missed > 0
