#!/usr/bin/env bash
# All benchmarks, one after the other; the disk ones in the given directory (default: bench-out).
set -euo pipefail
cd "$(dirname "$0")/.."
directory=${1:-bench-out}
mkdir -p "$directory"
.venv/bin/flexkv bench index
.venv/bin/flexkv bench copy
.venv/bin/flexkv bench disk --dir "$directory"
.venv/bin/flexkv bench e2e --dir "$directory"
.venv/bin/flexkv bench overlap --dir "$directory"
