#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
# The first turbo4 on a GPU: `first_turbo4_gpu.sh SITE tests` or `... tokens`. SITE is a
# site-packages folder whose vLLM has no patches, or the first turbo4 from an earlier run.
# `tests` runs its tests, with CUDA graphs in an engine. `tokens` times a token beside its
# peers. $PYTHON (python3) has PyTorch and vLLM's dependencies, and results go to $OUT.
set -eu
site=$(cd "$1" && pwd)
cd "$(dirname -- "$0")/.."
name=serve-a-turbo4-kv-cache-by-triton
python=${PYTHON:-python3}
out=${OUT:-$PWD/benchmarks/results}
# The series has the module too, but not in this place.
if [ ! -e "$site/vllm/v1/attention/ops/turbo/rotation.py" ]; then
  "$python" scripts/series.py pr $name --site "$site"
fi
export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
case ${2:-} in
  tests)
    # The repository's options of pytest are for its own tests.
    "$python" -m pytest -q -c /dev/null --noconftest -p no:cacheprovider -n 8 \
      --dist worksteal --durations=5 --disable-warnings \
      --rootdir proposals/$name/files "$PWD/proposals/$name/files/tests/kernels/turbo" \
      >"$out/first_turbo4_tests.txt" 2>&1 || status=$?
    tail -n 12 "$out/first_turbo4_tests.txt"
    exit "${status:-0}"
    ;;
  tokens)
    "$python" benchmarks/turbo_engine.py --arms turbo4:first auto fp8 \
      turboquant_4bit_nc --site-copy "${TMPDIR:-/tmp}/turboquant-site" --repeats 2 \
      --shapes 8x32768 1x65536 64x4096 --kv-cache-memory-bytes 36000000000 \
      --output "$out/first_turbo4.jsonl" --logs "${TMPDIR:-/tmp}/first-turbo4-logs"
    ;;
  *)
    echo "first_turbo4_gpu.sh: name tests or tokens" >&2
    exit 2
    ;;
esac
