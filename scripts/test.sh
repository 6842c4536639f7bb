#!/usr/bin/env bash
# The torch-free part of the suite on CPython 3.12 and 3.13 where they are installed, then all of it in .venv.
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
  echo "test: CPython $version, the part that needs no torch"
  $venv/bin/python -m pytest -q -m "not torch and not model"
done
echo "test: $(.venv/bin/python --version), everything"
exec .venv/bin/python -m pytest "$@"
