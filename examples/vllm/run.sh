#!/usr/bin/env bash
# Run one of these examples, or anything else, with stock vLLM for CPUs and this flexkv:
#   examples/vllm/run.sh ttft.py            examples/vllm/run.sh -m vllm.entrypoints.openai.api_server ...
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.."
source scripts/common.sh
source scripts/vllm.sh
prepare_vllm
[[ -e "$here/${1:-}" ]] && set -- "$here/$1" "${@:2}"
exec "$vllm_python" "$@"
