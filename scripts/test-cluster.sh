#!/usr/bin/env bash
# Clusters: several managers, in one process and in several, on redis-servers that the tests start themselves.
#   scripts/test-cluster.sh -k two_nodes    arguments go to pytest
set -euo pipefail
cd "$(dirname "$0")/.."
command -v redis-server >/dev/null || command -v valkey-server >/dev/null ||
  echo "test-cluster: NO redis-server HERE: what needs one IS NOT TESTED" >&2
exec .venv/bin/python -m pytest -q tests/cluster "$@"
