#!/usr/bin/env bash
# Serve a model with compressed caches, on the CPU: examples/serve.sh MODEL [arguments of vLLM's server]
# In the environment of scripts/setup-vllm. Then, in another shell:
#   curl localhost:8000/v1/completions -H 'Content-Type: application/json' \
#       -d '{"model": "MODEL", "prompt": "...", "max_tokens": 16, "temperature": 0}'
set -euo pipefail
model=$1
shift
exec python -m vllm.entrypoints.openai.api_server --model "$model" \
    --no-enable-chunked-prefill --no-enable-prefix-caching \
    --max-model-len 4096 --max-num-seqs 64 --max-num-batched-tokens 4160 \
    --additional-config '{"kvpass": {"policy": "lava", "budget": 256, "room": 512}}' "$@"
