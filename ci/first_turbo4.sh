#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
# The first turbo4, alone on the pinned release: `first_turbo4.sh CHECKOUT`, which is from
# `series.py sdist --git`. vLLM's own checks pass on it. Its tests run as vLLM would run
# them, but without vLLM's conftest, whose imports are not here. Without a GPU Triton's
# interpreter runs the kernels, and Triton lowers them for a GPU.
set -eu
checkout=$(cd "$1" && pwd)
cd "$(dirname -- "$0")/.."
project=$PWD
python=${VENV:-$PWD/.venv}/bin/python
scratch=$(mktemp -d)
trap 'git -C "$checkout" worktree remove --force "$scratch/vllm"; rm -rf "$scratch"' EXIT
base=$(git -C "$checkout" rev-list --max-parents=0 HEAD)
git -C "$checkout" worktree add --quiet --detach "$scratch/vllm" "$base"
"$python" scripts/series.py pr serve-a-turbo4-kv-cache-by-triton --site "$scratch/vllm"
git -C "$scratch/vllm" add --all
"$python" ci/vllm_hooks.py "$scratch/vllm" --staged
cd "$scratch/vllm"
export PYTHONPATH="$scratch/vllm${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1
set -- --noconftest -n logical --dist worksteal --durations=3 --disable-warnings
if "$python" -c 'import vllm_turbo_cpu_standins' 2>/dev/null; then
  set -- "$@" -p vllm_turbo_cpu_standins.interpreter -p vllm_turbo_cpu_standins.varlen
  export VLLM_TARGET_DEVICE=cpu TORCH_COMPILE_DISABLE=1
  "$python" "$project/ci/lower_first_turbo4.py"
  export TRITON_INTERPRET=1 CUDA_VISIBLE_DEVICES=
fi
"$python" -m pytest -q "$@" tests/kernels/turbo
