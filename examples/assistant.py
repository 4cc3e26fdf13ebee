"""Let the compressed cache draft and the full one check; with another model: ``examples/assistant.py MODEL``.

Prints::

    equal: True; model alone: ... s, then ... a token; with drafts: ... s, then ... a token, ... accepted in a check
    ...
"""

import sys
import time

import torch

import kvpass
from kvpass.eval.tasks import encode, find_tasks
from kvpass.loading import load_model


class Arrivals(list):  # a streamer: when the prompt came, then the tokens of each step or check, and how many
    def put(self, tokens):
        self.append((time.perf_counter(), tokens.numel()))

    def end(self):
        (began, first, *_, last), (_, *counts) = zip(*self, strict=True)
        self.accepted = sum(counts) / len(counts) - 1
        self.seconds = f"{first - began:.2f} s, then {(last - first) / sum(counts[1:]):.3f} a token"


model, tokenizer = load_model(*(sys.argv[1:] or ["builtin"]), dtype="float32", device="cpu")
fast = kvpass.compile(model, policy="snapkv", kernel_size=31, budget=0.25)
fast.warmup(prompt_tokens=256, turns=True)
for sample in find_tasks(["multi_needle"])[0].samples(tokenizer, 1024, 8, 0):
    ids, alone, drafted = torch.tensor([encode(tokenizer, sample, chat=True).ids]), Arrivals(), Arrivals()
    call = {"attention_mask": torch.ones_like(ids), "min_new_tokens": 32, "max_new_tokens": 32, "do_sample": False}
    said = [model.generate(ids, streamer=alone, **call)]
    said.append(model.generate(ids, streamer=drafted, assistant_model=fast, **call))
    print(f"equal: {torch.equal(*said)}; model alone: {alone.seconds}; ", end="")
    print(f"with drafts: {drafted.seconds}, {drafted.accepted:.1f} accepted in a check")
