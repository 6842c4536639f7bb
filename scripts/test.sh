#!/usr/bin/env bash
# The torch-free part of the suite on CPython 3.12 and 3.13 where they are installed; then in .venv the plug-ins,
# the suites on the simulated device, and all of it on the cpu.
# Arguments go to the last pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/common.sh

for version in 3.12 3.13; do
  if ! python=$(find_python $version); then
    echo "test: no CPython $version here, skipping it"
    continue
  fi
  venv=.venv-$version
  wanted=$(fingerprint "$("$python" --version)" pyproject.toml)
  if [[ "$(cat $venv/.packages 2>/dev/null)" != "$wanted" ]]; then
    say "making $venv with $("$python" --version), without torch"
    rm -rf $venv
    "$python" -m venv $venv
    $venv/bin/python scripts/requirements.py build project test --without torch >$venv/requirements.txt
    $venv/bin/python -m pip install -qq -r $venv/requirements.txt
    echo "$wanted" >$venv/.packages
  fi
  install_flexkv $venv
  install_plugins $venv
  echo "test: CPython $version, the part that needs no torch"
  $venv/bin/python -m pytest -q -m "not torch and not model"
done
python=$PWD/.venv/bin/python
if (($# == 0)); then
  # plug-ins as their authors see them: from a folder outside of the project
  elsewhere=$(mktemp -d)
  trap 'rm -rf "$elsewhere"' EXIT
  verify=(--flexkv-verify example --flexkv-verify example_store)
  verify+=(--flexkv-verify simulated --flexkv-verify simulated_direct)
  echo "test: the plug-ins of plugins/ pass the conformance kit"
  (cd "$elsewhere" && "$python" -m pytest -q "${verify[@]}")
  echo "test: the suites that a slow device with random latencies must pass as well"
  $python -m pytest -q --device simulated -m "not model" $(cat tests/on_any_device.txt)
fi
echo "test: $($python --version), everything"
$python -m pytest "$@"
