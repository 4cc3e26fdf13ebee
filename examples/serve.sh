#!/usr/bin/env bash
# Serve a model with compressed caches, on the CPU: examples/serve.sh MODEL [arguments of vLLM's server]
# In the environment of scripts/setup-vllm. Then, in another shell:
#   curl localhost:8000/v1/completions -H 'Content-Type: application/json' \
#       -d '{"model": "MODEL", "prompt": "...", "max_tokens": 16, "temperature": 0}'
# With a document that many requests share (docs/serve.md):
#   kvpass compress manual.txt -o manual.kv --model MODEL --dtype float32 --policy kvzip --budget 0.25
#   examples/serve.sh MODEL --dtype float32 \
#       --additional-config '{"kvpass": {"policy": "lava", "budget": 64, "room": 512, "documents": ["manual=manual.kv"]}}'
#   curl ... -d '{..., "add_special_tokens": false, "vllm_xargs": {"kvpass_document": "manual"}}'
set -euo pipefail
model=$1
shift
exec python -m vllm.entrypoints.openai.api_server --model "$model" \
    --enable-chunked-prefill --no-enable-prefix-caching \
    --max-model-len 4096 --max-num-seqs 64 --max-num-batched-tokens 512 \
    --additional-config '{"kvpass": {"policy": "lava", "budget": 256, "room": 512}}' "$@"
