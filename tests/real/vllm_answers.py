"""``python vllm_answers.py FOLDER``: prints the greedy tokens of prompts in vLLM; settings and prompts come as JSON."""

import json
import os
import sys

os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
os.environ |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}

from vllm import LLM, SamplingParams

if __name__ == "__main__":
    given = json.load(sys.stdin)
    engine = LLM(
        model=sys.argv[1],
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=1280,
        max_num_batched_tokens=1280,
        enforce_eager=True,
        enable_prefix_caching=False,
        enable_chunked_prefill=False,
        kv_cache_memory_bytes=512 * 2**20,
        additional_config={"kvpass": given["kvpass"]},
    )
    params = SamplingParams(max_tokens=given["new_tokens"], temperature=0, detokenize=False, ignore_eos=True)
    prompts = [{"prompt_token_ids": ids} for ids in given["prompts"]]
    answers = [list(out.outputs[0].token_ids) for out in engine.generate(prompts, params, use_tqdm=False)]
    print("\n" + json.dumps(answers))
