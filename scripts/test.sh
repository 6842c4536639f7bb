#!/usr/bin/env bash
# The torch-free part of the suite on CPython 3.12 and 3.13 where they are installed; then in .venv the plug-ins,
# the suites on the simulated device, and all of it on the cpu.
#   scripts/test.sh others    only the first of these: the other interpreters
#   scripts/test.sh rest      only what follows
# Other arguments go to the last pytest, which then is all that runs in .venv, in one process. Else several processes
# share the tests (pytest-xdist): as many as there are cores, four at most, or PROCESSES.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/common.sh

processes=${PROCESSES:-$(nproc)}
shared=(-n "$((processes < 4 ? processes : 4))" --dist worksteal)

# What depends on the interpreter; see tests/once.txt for what does not.
test_on() {
  local version=$1 python venv=.venv-$1 wanted
  if ! python=$(find_python "$version"); then
    echo "test: no CPython $version here, skipping it"
    return 0
  fi
  wanted=$(fingerprint "$("$python" --version)" pyproject.toml)
  if [[ "$(cat $venv/.packages 2>/dev/null)" != "$wanted" ]]; then
    say "making $venv with $("$python" --version), without torch"
    rm -rf "$venv"
    "$python" -m venv "$venv"
    "$venv/bin/python" scripts/requirements.py build project test --without torch >"$venv/requirements.txt"
    pip_into "$venv" -r "$venv/requirements.txt"
    echo "$wanted" >"$venv/.packages"
  fi
  install_flexkv "$venv"
  install_plugins "$venv"
  echo "test: CPython $version, the part that needs no torch"
  "$venv/bin/python" -m pytest -q "${shared[@]}" -m "not torch and not model and not once" --kills 10
}

# Everything that is installed, as authors of plug-ins see it: from a folder outside of the project.
verify_plugins() {
  local python=$1 names verify=()
  elsewhere=$(mktemp -d)
  trap 'rm -rf "$elsewhere"' EXIT
  names=$("$python" -c 'from flexkv import plugins as p
print(*sorted({name for group in (p.BACKENDS, p.POLICIES, p.CODECS) for name in p.available(group)}))')
  for name in $names; do verify+=(--flexkv-verify "$name"); done
  echo "test: all that is installed passes the conformance kit: $names"
  (cd "$elsewhere" && "$python" -m pytest -q -p no:cacheprovider "${shared[@]}" "${verify[@]}")
}

what=${1:-}
case "$what" in
others | rest) shift ;;
*) what=all ;;
esac
if [[ "$what" != rest ]]; then
  test_on 3.12
  test_on 3.13
fi
[[ "$what" != others ]] || exit 0
python=$PWD/.venv/bin/python
if (($# == 0)); then
  verify_plugins "$python"
  echo "test: the suites that a slow device with random latencies must pass as well"
  "$python" -m pytest -q "${shared[@]}" --device simulated --kills 10 -m "not model" $(cat tests/on_any_device.txt)
  echo "test: the core suites on the cuda backend over a fake CUDA"
  "$python" -m pytest -q "${shared[@]}" --device cuda_on_fake $(cat tests/on_fake_cuda.txt)
  # test-cluster.sh runs tests/cluster
  set -- "${shared[@]}" --ignore tests/cluster --deselect tests/test_kit.py::TestPolicies # all of them were verified above
fi
echo "test: $("$python" --version), everything"
"$python" -m pytest "$@"
