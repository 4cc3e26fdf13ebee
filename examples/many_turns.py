"""Turns on one cache, compressed to its budget again when it has doubled.

Prints::

    482 913 . (618 tokens seen, 474 entries per head)
    271 605 . (837 tokens seen, 258 entries per head)
    350 128 . (1056 tokens seen, 477 entries per head)
"""

import torch

import kvpass
from kvpass import builtin

model, tokenizer = builtin.load()
fast = kvpass.compile(model, policy="lava", budget=256, recompress="when_full")
filler = (
    "the old farmer carried the lamp near the river . a quiet baker watched the fox behind the castle . "
    "every tired sailor found some letter inside the tower . the young teacher opened a basket near the bridge . "
)


def ids(text: str) -> torch.Tensor:
    return tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]


cache = fast.compress(ids(10 * filler), reusable=False)  # later calls append to it
last = torch.empty(1, 0, dtype=torch.int64)
for name, value in (("bara dador", "482 913"), ("kura fenix", "271 605"), ("lato sopas", "350 128")):
    turn = f"the code of {name} is {value} . {5 * filler}question the code of {name} is"
    out = fast.generate(torch.cat([last, ids(turn)], 1), past_key_values=cache, max_new_tokens=3, do_sample=False)
    last = out[:, -1:]  # generated, but not in the cache yet: the next turn begins with it
    held = cache.lengths.double().mean().item()
    print(f"{tokenizer.decode(out[0, -3:])} ({cache.get_seq_length()} tokens seen, {held:.0f} entries per head)")
