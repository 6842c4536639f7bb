#!/usr/bin/env bash
# Make flexkv/backends/cuda/move.ptx, which drivers compile for their GPU (sm_80 and newer), and check that it and the
# source compile for sm_80, sm_90 and sm_100. Needs nvcc 13.
#   scripts/make_ptx.sh [FILE]    write FILE instead
set -euo pipefail
cd "$(dirname "$0")/../flexkv/backends/cuda"
target=${1:-move.ptx}
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
nvcc -ptx -O3 -arch=compute_80 -o "$place/move.ptx" move.cu
# The source uses nothing that is newer than PTX 8.0: with that version the drivers of CUDA 12.0 take it too. Lines with
# `//` say which nvcc it was.
sed -e 's/^\.version .*/.version 8.0/' -e '/^\/\//d' "$place/move.ptx" >"$place/whole.ptx"
for arch in sm_80 sm_90 sm_100; do
  nvcc -cubin -O3 -arch=$arch -o "$place/$arch.cubin" move.cu
  ptxas -arch=$arch -o "$place/$arch.cubin" "$place/whole.ptx"
done
cp "$place/whole.ptx" "$target"
