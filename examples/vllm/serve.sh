#!/usr/bin/env bash
# An OpenAI-compatible server with flexkv: examples/vllm/serve.sh MODEL [vLLM options ...]
# Settings: PORT (8000), HOST_CACHE (8GiB), SSD_CACHE (0: none), SSD_DIR.
set -euo pipefail
model=${1:?usage: serve.sh MODEL [vLLM options ...]}
shift
settings="\"host_cache_bytes\": \"${HOST_CACHE:-8GiB}\""
if [[ "${SSD_CACHE:-0}" != 0 ]]; then
  settings+=", \"disk_cache_bytes\": \"$SSD_CACHE\", \"disk_dirs\": [\"${SSD_DIR:-$PWD/flexkv_ssd}\"]"
fi
exec "$(dirname "$0")/run.sh" -m vllm.entrypoints.openai.api_server --model "$model" --port "${PORT:-8000}" \
  --enable-prompt-tokens-details --kv-transfer-config "{
    \"kv_connector\": \"FlexKVConnector\",
    \"kv_connector_module_path\": \"flexkv.integration.vllm.connector\",
    \"kv_role\": \"kv_both\",
    \"kv_connector_extra_config\": {$settings}}" "$@"
