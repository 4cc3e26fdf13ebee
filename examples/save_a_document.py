"""Compress a document once, save it, and ask it questions later.

Prints::

    document.kv: ... KiB
    question the code of bara dador is 482 913 .
    question the pin of kura fenix is 271 605 .
"""

from pathlib import Path

import kvpass
from kvpass import builtin

model, tokenizer = builtin.load()
fast = kvpass.compile(model, policy="lava", budget=256)
facts = "the code of bara dador is 482 913 . the pin of kura fenix is 271 605 . "
filler = (
    "the old farmer carried the lamp near the river . a quiet baker watched the fox behind the castle . "
    "every tired sailor found some letter inside the tower . the young teacher opened a basket near the bridge . "
)
document = facts + 10 * filler

file = Path("document.kv")
fast.compress(tokenizer(document, return_tensors="pt")["input_ids"]).save(file)
print(f"{file}: {file.stat().st_size // 1024} KiB")

cache = kvpass.load_cache(file, fast)  # questions do not change it
for question in ("question the code of bara dador is", "question the pin of kura fenix is"):
    ids = tokenizer(question, add_special_tokens=False, return_tensors="pt", return_token_type_ids=False)
    out = fast.generate(**ids, past_key_values=cache, max_new_tokens=3, do_sample=False)
    print(tokenizer.decode(out[0]))
