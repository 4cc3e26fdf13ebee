"""One model on two processes, which share its heads: torchrun --nproc-per-node 2 examples/tensor_parallel.py

Prints::

    482 913 .
    4 heads on 2 processes, 1536 KiB
"""

import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.distributed import DistributedConfig

import kvpass
from kvpass import builtin

model = AutoModelForCausalLM.from_pretrained(
    builtin.path(), dtype="float32", distributed_config=DistributedConfig(tp_size=2)
).eval()
tokenizer = AutoTokenizer.from_pretrained(builtin.path())
text = "the code of bara dador is 482 913 . " + 50 * "the old farmer carried the lamp near the river . "
inputs = tokenizer(text + "question the code of bara dador is", return_tensors="pt", return_token_type_ids=False)

fast = kvpass.compile(model, policy="snapkv", budget=128)
out = fast.generate(**inputs, max_new_tokens=3, do_sample=False)  # every process calls it, with the same arguments
if dist.get_rank() == 0:
    print(tokenizer.decode(out[0, -3:]))
    kept = fast.report()
    print(f"{kept.lengths.shape[2]} heads on 2 processes, {int(kept.bytes_kept.sum()) // 1024} KiB")
dist.destroy_process_group()
