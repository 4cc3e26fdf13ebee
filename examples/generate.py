"""Ask about a text with a compressed cache, and see what was kept: examples/generate.py [MODEL [FILE]]

Prints::

    full, 54816 KiB:  In the NOTICE file
    lava, 13704 KiB:  In the NOTICE file
    lava, 960 KiB:  In the Apache License
"""

import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import kvpass

name, file = (*sys.argv[1:], *("Qwen/Qwen2.5-Coder-0.5B-Instruct", "LICENSE")[len(sys.argv) - 1 :])
model = AutoModelForCausalLM.from_pretrained(name, dtype="float32").eval()
tokenizer = AutoTokenizer.from_pretrained(name)
text = Path(file).read_text() + "\n\nQuestion: In which file are attribution notices?\nAnswer:"
inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
fast = kvpass.compile(model, policy="full")
for policy, budget in (("full", None), ("lava", 0.25), ("lava", 40)):
    fast.set_policy(policy, budget)  # the model is not captured again
    out = fast.generate(**inputs, max_new_tokens=4, do_sample=False)
    print(f"{policy}, {int(fast.report().bytes_kept.sum()) // 1024} KiB: {tokenizer.decode(out[0, -4:])}")
