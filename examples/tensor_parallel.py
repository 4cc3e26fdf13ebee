"""One model on two processes, which share its heads: torchrun --nproc-per-node 2 examples/tensor_parallel.py [MODEL]

Prints::

     In the NOTICE file
    2 KV heads on 2 processes, 13704 KiB
"""

import sys
from pathlib import Path

import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.distributed import DistributedConfig

import kvpass

name = sys.argv[1] if sys.argv[1:] else "Qwen/Qwen2.5-Coder-0.5B-Instruct"
model = AutoModelForCausalLM.from_pretrained(name, dtype="float32", distributed_config=DistributedConfig(tp_size=2))
tokenizer = AutoTokenizer.from_pretrained(name)
text = Path("LICENSE").read_text() + "\n\nQuestion: In which file are attribution notices?\nAnswer:"
inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False)

fast = kvpass.compile(model.eval(), policy="lava", budget=0.25)
out = fast.generate(**inputs, max_new_tokens=4, do_sample=False)  # every process calls it, with the same arguments
if dist.get_rank() == 0:
    print(tokenizer.decode(out[0, -4:]))
    kept = fast.report()
    print(f"{kept.lengths.shape[2]} KV heads on 2 processes, {int(kept.bytes_kept.sum()) // 1024} KiB")
dist.destroy_process_group()
