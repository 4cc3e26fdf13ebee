"""Generate with a compressed cache, and see what was kept: examples/generate.py [MODEL]

Prints::

    full cache:        482 913 . 6204 KiB
    128 of 517 tokens: 482 913 . 1536 KiB
"""

import sys

import kvpass
from kvpass import builtin

model, tokenizer = builtin.load(*sys.argv[1:])  # or AutoModelForCausalLM.from_pretrained(...).eval() and its tokenizer
text = "the code of bara dador is 482 913 . " + 50 * "the old farmer carried the lamp near the river . "
inputs = tokenizer(text + "question the code of bara dador is", return_tensors="pt", return_token_type_ids=False)
tokens = inputs["input_ids"].shape[1]

fast = kvpass.compile(model, policy="full")
for label in ("full cache:", f"128 of {tokens} tokens:"):
    out = fast.generate(**inputs, max_new_tokens=3, do_sample=False)
    kept = int(fast.report().bytes_kept.sum())
    print(f"{label:18} {tokenizer.decode(out[0, -3:])} {kept // 1024} KiB")
    fast.set_policy("lava", 128)  # the model is not captured again
