# Shared by the scripts; sourced from the project's root.

say() { printf 'setup: %s\n' "$*"; }

# One hash over words and files: a stamp that changes when any of them does.
fingerprint() {
  for item in "$@"; do
    if [[ -f "$item" ]]; then cat "$item"; else echo "$item"; fi
  done | sha256sum | cut -d ' ' -f 1
}

check_python() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || {
    say "$1 is not a CPython >= 3.11; say which to use: make setup PYTHON=/path/to/python3" >&2
    exit 1
  }
}

# A compiler, liburing and xxhash; fio is the peer of `flexkv bench disk`, redis-server what tests of the remote tier start,
# libibverbs1, libnuma1 and libcurl4 what Mooncake's wheel is linked to.
install_system_packages() {
  command -v dpkg-query >/dev/null || return 0
  local missing=() package
  for package in build-essential liburing-dev libxxhash-dev fio redis-server libibverbs1 libnuma1 libcurl4; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
  done
  ((${#missing[@]})) || return 0
  if [[ $EUID -ne 0 ]] || ! command -v apt-get >/dev/null; then
    say "missing system packages; install them with: sudo apt-get install ${missing[*]}"
    return 0
  fi
  say "installing ${missing[*]}"
  apt-get update -qq >/dev/null
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

# Install packages into a virtual environment. Python compiles what is imported by itself, a quarter of it all: compiling the
# rest takes two thirds of an installation's time.
pip_into() {
  local venv=$1
  shift
  "$venv/bin/python" -m pip install -qq --no-compile "$@"
}

# One at a time, whoever else is at it: pip writes beside the sources of what it installs.
alone() {
  mkdir -p build
  (
    ! command -v flock >/dev/null || flock 9
    "$@"
  ) 9>build/install.lock
}

# Install flexkv editable into a virtual environment, unless its C sources are those already built there.
install_flexkv() {
  local venv=$1 wanted
  wanted=$(fingerprint "$PWD" "$("$venv/bin/python" --version)" pyproject.toml flexkv/_core/*)
  if [[ "$(cat "$venv/.flexkv" 2>/dev/null)" != "$wanted" ]]; then
    say "building flexkv for $venv"
    PATH="$PWD/$venv/bin:$PATH" alone pip_into "$venv" --no-build-isolation --no-deps \
      -C build-dir="build/${venv#.}" -e .
    echo "$wanted" >"$venv/.flexkv"
  fi
}

# Install the packages below plugins/ editable, as their users would: through their own metadata.
install_plugins() {
  local venv=$1 wanted
  wanted=$(fingerprint "$PWD" "$venv/.flexkv" plugins/*/pyproject.toml plugins/*/*/_native/*)
  [[ "$(cat "$venv/.plugins" 2>/dev/null)" != "$wanted" ]] || return 0
  say "installing plugins/ into $venv"
  alone pip_into "$venv" --no-deps -e plugins/flexkv-example
  PATH="$PWD/$venv/bin:$PATH" alone pip_into "$venv" --no-build-isolation --no-deps \
    -C build-dir="build/${venv#.}-simulated" -e plugins/flexkv-simulated
  echo "$wanted" >"$venv/.plugins"
}

# Print a working interpreter for a version such as 3.12: from PATH, or one that pyenv keeps.
find_python() {
  local candidate
  for candidate in "$(command -v "python$1" || true)" "$HOME"/.pyenv/versions/"$1"*/bin/python; do
    if [[ -x "$candidate" ]] && "$candidate" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$1')" 2>/dev/null; then
      echo "$candidate"
      return 0
    fi
  done
  return 1
}
