"""Let the compressed cache draft and the full one check: examples/assistant.py [MODEL [FILE]]

Prints::

    equal: True; model alone: ... s; with drafts: ... s, ... accepted in a check
"""

import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvpass


class Counts(list):  # a streamer: how many tokens the prompt has, and each step or check gave
    def put(self, tokens):
        self.append(tokens.numel())

    def end(self):
        pass


name, file = (*sys.argv[1:], *("HuggingFaceTB/SmolLM2-135M-Instruct", "LICENSE")[len(sys.argv) - 1 :])
model = AutoModelForCausalLM.from_pretrained(name, dtype="float32").eval()
ids = AutoTokenizer.from_pretrained(name)(Path(file).read_text(), return_tensors="pt").input_ids
fast = kvpass.compile(model, policy="snapkv", kernel_size=31, budget=0.25)
fast.warmup(prompt_tokens=256, turns=True)
said, times, call = [], [time.perf_counter()], {"min_new_tokens": 32, "max_new_tokens": 32, "do_sample": False}
for assistant in (None, fast):
    counts = Counts()
    said.append(model.generate(ids, streamer=counts, assistant_model=assistant, **call))
    times.append(time.perf_counter())
print(f"equal: {torch.equal(*said)}; model alone: {times[1] - times[0]:.1f} s; ", end="")
print(f"with drafts: {times[2] - times[1]:.1f} s, {sum(counts[1:]) / len(counts[1:]) - 1:.1f} accepted in a check")
