#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
# Run the tests, cheap to dear:
# test.sh [lint|series|tooling|kernels|quality|engine]... [--all]
# With --all, kernels and engine have what CI leaves out: many cases of kernels' tests in
# Triton's interpreter, many checkpoints and models.
set -eu
cd "$(dirname -- "$0")/.."
python=$(scripts/find_python.sh)
VENV=${VENV:-$PWD/.venv}
export VENV VLLM_NO_USAGE_STATS=1
# Hundreds of processes import vLLM: the first of them compiles it for the others.
unset PYTHONDONTWRITEBYTECODE
all=
for step; do
  shift
  case $step in
    --all) all=--all ;;
    *) set -- "$@" "$step" ;;
  esac
done
[ $# -gt 0 ] || set -- lint series tooling kernels quality engine
for step; do
  case $step in
    lint | series | tooling | kernels | quality | engine) ;;
    *) echo "test.sh: no step '$step'" >&2 && exit 2 ;;
  esac
done
case "$all $*" in
  --all*engine* | --all*kernels* | " "*) ;;
  *) echo "test.sh: --all is for kernels and engine" >&2 && exit 2 ;;
esac
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

lint() {
  pre-commit run --all-files
}

# The series applies to the pinned source without fuzz, and comes back byte for byte.
# vLLM's own checks pass on its files, it steps to a release where lines have moved, and
# each of its entries stands alone, as does the first turbo4. The recipes that the tables
# name are vLLM's.
series() {
  "$python" scripts/series.py index --check
  "$python" scripts/series.py sdist --git "$scratch/vllm"
  # It takes as long as all the others here, on a core that they leave idle.
  python ci/step.py "$scratch/vllm" >"$scratch/step" 2>&1 &
  beside=$!
  trap 'kill "$beside" 2>/dev/null && wait "$beside" || :' EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM HUP
  python scripts/recipes.py --sdist "$scratch/vllm"
  "$python" scripts/series.py lint --base "$scratch/vllm"
  "$python" scripts/series.py import "$scratch/vllm"
  "$python" scripts/series.py export --check "$scratch/vllm"
  python ci/vllm_hooks.py "$scratch/vllm"
  ci/first_turbo4.sh "$scratch/vllm"
  wait "$beside" && stepped=0 || stepped=$?
  trap - EXIT
  cat "$scratch/step"
  [ "$stepped" = 0 ] || exit "$stepped"
  python ci/entries.py "$scratch/vllm" --preload \
    torch._dynamo torch._inductor.compile_fx torchvision transformers triton \
    aiohttp fastapi openai.types.chat openai.types.responses
}

tooling() {
  python -m pytest -q -n logical --import-mode=prepend tests/tooling
}

apply() {
  PYTHON="$VENV/bin/python" scripts/apply.sh
  PYTHON="$VENV/bin/python" scripts/verify.sh
}

# Has the environment no GPU? Then Triton's interpreter runs the kernels.
without_gpu() {
  python -c 'import vllm_turbo_cpu_standins' 2>/dev/null
}

kernels() {
  apply
  set --
  if without_gpu; then
    set -- -p vllm_turbo_cpu_standins.interpreter -p vllm_turbo_cpu_standins.left_out \
      -p vllm_turbo_cpu_standins.inspection -p vllm_turbo_cpu_standins.launches
    export VLLM_TARGET_DEVICE=cpu TRITON_INTERPRET=1 CUDA_VISIBLE_DEVICES=
    export TURBO_LAUNCHES="$scratch/launches"
    mkdir "$TURBO_LAUNCHES"
  fi
  # The interpreter takes one core. Without --all some cases run, and no kernel is
  # compiled again.
  some=
  if without_gpu && [ -z "$all" ]; then some=yes; fi
  PYTHONPATH=$PWD/ci${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=1 python -m pytest -q \
    "$@" ${some:+-p some_cases -p compiled} -n logical --dist worksteal --durations=5 \
    vllm_overlay/tests/kernels/turbo
  if without_gpu; then
    # CUDA's kernels, a few cases of them, on an emulated GPU.
    OMP_NUM_THREADS=1 python -m pytest -q "$@" -p vllm_turbo_cpu_standins.cuda.plugin \
      -n logical --dist loadfile --durations=5 vllm_overlay/tests/kernels/turbo
    # Triton's compiler refuses some of what its interpreter takes, and an older one
    # more.
    python -m pip install --quiet --disable-pip-version-check --no-deps \
      --target "$scratch/triton" --requirement requirements/triton.txt
    for path in '' "$scratch/triton"; do
      env -u TRITON_INTERPRET PYTHONPATH="$path" python ci/lower_kernels.py \
        "$TURBO_LAUNCHES"
    done
    # Every module that serving may ask for, on any GPU, is read by a compiler.
    OMP_NUM_THREADS=1 python -m pytest -q -n logical --dist worksteal tests/instances
  fi
}

# The paper, the lab and the small model: PyTorch on the CPU, with or without a GPU.
quality() {
  apply
  CUDA_VISIBLE_DEVICES='' OMP_NUM_THREADS=1 python -m pytest -q -n logical \
    --durations=5 tests/quality
}

engine() {
  if ! without_gpu; then
    echo "left out: these tests are for the CPU platform, and $VENV is for a GPU"
    return
  fi
  apply
  # The tests of a file share engines. Each engine takes one core, mostly. Threads of
  # PyTorch that wait for a core wait in a loop: three seconds become a minute.
  OMP_NUM_THREADS=1 python -m pytest -q -n logical --dist loadfile --no-loadscope-reorder \
    --durations=5 ${all:+"$all"} tests/engine
}

total=$(($# + 1)) number=1
echo "[1/$total] environment"
"$python" scripts/env.py --venv "$VENV" --tools test lint --lazy
PATH=$VENV/bin:$PATH
for step; do
  number=$((number + 1)) start=$(date +%s)
  echo "[$number/$total] $step"
  # A subshell keeps a step's variables; errexit ends it, and us, at a failure.
  (set -e && "$step")
  echo "[$number/$total] $step passed in $(($(date +%s) - start)) s"
done
case " $* " in *" kernels "*) VLLM_TARGET_DEVICE=cpu python ci/native_kernels.py ;; esac
echo "all passed"
