#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
# What needs a GPU, or many cores: gpu.sh
# [kernels|architectures|sanitizer|defects|bench|extend|mla|profile|engine|throughput|
# models|offload|pictures|serve|start|quality|lab|latents|equality|dcp|families|
# checkpoints|check|memory|soak|restarts|image|transfers]...
#
# It runs with the vLLM that $PYTHON (python3) imports; the series must be applied to
# it. Results go to $OUT (benchmarks/results). These variables add arguments:
# KERNELS_ARGS, ARCHITECTURES_ARGS, SANITIZER_ARGS, DEFECTS_ARGS, BENCH_ARGS,
# EXTEND_ARGS, MLA_ARGS, PROFILE_ARGS, ENGINE_ARGS, THROUGHPUT_ARGS, MODELS_ARGS,
# OFFLOAD_ARGS, PICTURES_ARGS, SERVE_ARGS, START_ARGS, QUALITY_ARGS, LAB_ARGS,
# LATENTS_ARGS, EQUALITY_ARGS, DCP_ARGS, FAMILIES_ARGS, CHECKPOINTS_ARGS, CHECK_ARGS,
# MEMORY_ARGS, SOAK_ARGS, RESTARTS_ARGS, IMAGE_ARGS, TRANSFERS_ARGS.
#
# kernels is mostly compilers: KERNELS_ARGS="-n 16 --dist worksteal" for as many cores,
# which share the GPUs that there are. With "--shard 1/2", too, it is the first of two
# parts: kernels that the first has built are there for the second. When all tests have
# passed, native_kernels.json says of which sources that was; FAMILIES="cuda/store
# triton/merge" runs and records those of some kernels alone: ci/native_kernels.py.
#
# architectures compiles every CUDA kernel for every architecture, without a GPU: hours of
# one core. It packs them for scripts/apply.sh --kernels, and fails if they take too many
# bytes. ARCHITECTURES_ARGS="--arch 9.0" is for one; with --folder DIR, too, the archive
# has what former runs have left there, and a run that was ended is gone on with.
#
# sanitizer runs store, decode (of drafts too, uniform and ragged), extend (of few and of
# many queries), merge and recent windows under compute-sanitizer, and makes sure that
# it finds what is planted for it. defects plants others in the kernels, each by itself,
# and makes sure that the kernels' tests find them.
#
# profile asks Nsight Compute what the kernels of a decode step are bound by. extend
# times attention of several query tokens to cached context, by their number. mla times
# the kernels of multi-head latent attention beside FlashAttention's and FlashMLA's, and
# new tokens behind cached latents, absorbed and projected up.
#
# throughput is the engine's, with a cache of 8 GiB. models times the decode steps of a
# model of another kind, which MODELS_ARGS="--model benchmarks/configs/... --layers 12"
# names: layers with windows, sinks, states or larger heads. With --quantization awq its
# weights have 4 bits; --parts prefix [--prefix-match-unit 16] has chats go on instead, and
# says what they found in the prefix cache. offload copies pages to the host's memory and
# back, restores prompts from there, and times decoding in the layouts that suit copies:
# it starts three engines side by side, which need 90 GB. pictures draws what is in $OUT,
# and alone needs neither a GPU nor vLLM.
#
# start times how long a server takes to be ready, with nothing built before and with
# everything, in six minutes a round; START_ARGS="--first-round 1" adds another round to
# the medians. On two GPUs START_ARGS="--arms fp8 turbo4 --at-once 2 --full-starts 3" has
# three starts of each arm that find everything built, in seven minutes.
#
# equality holds every way to run requests to one at a time. On two GPUs it is for
# EQUALITY_ARGS="--prefill stored --jobs 4 --modes tensor_parallel tensor_parallel_heads
# pipeline_parallel expert_parallel data_parallel", too. dcp needs two GPUs, and runs if
# it is named: answers where ranks share sequences, how many tokens they hold, and what a
# step takes of a model with one KV head, with that and without, in the shapes that
# DCP_ARGS has. transfers needs two GPUs and NIXL, and runs if it is named, too: answers
# where one engine goes on from another's pages, also of other tensor-parallel sizes, and
# what a prompt takes from the one to the other, beside bf16's. families holds CUDA's kernels to
# Triton's on seeded models with windows, sinks, a soft cap, shared caches, chunks and
# states. checkpoints has AWQ, GPTQ, compressed-tensors, FP8 and ModelOpt, with and
# without experts, which are 52 starts of an engine. check runs scripts/check_model.py on
# models/needle-qwen3, or on the model that CHECK_ARGS names. memory asks for growth after
# the start, at the model's context and at a million tokens. soak takes an hour at most;
# SOAK_ARGS="--kv-cache-dtype k4v3 --window --drafts ngram --offload 8 --transfers 0.05"
# has all that can go on beside requests. restarts kills a server under load, and starts
# it again. image builds kernels as docker/Dockerfile does, and starts an engine that has
# no nvcc.
#
# On an H200 quality takes less than ten minutes and lab a minute or two. latents is the
# lab of MLA: the model's predictions on what formats of latents read back, all by the
# same arithmetic. quality and pictures draw with matplotlib (requirements/test.txt), the
# former unless QUALITY_ARGS is --no-pictures.
set -u
cd "$(dirname -- "$0")/.." || exit
python=${PYTHON:-python3}
out=${OUT:-$PWD/benchmarks/results}
: "${COMMIT:=$(git rev-parse HEAD 2>/dev/null)}"
export COMMIT PYTHONUNBUFFERED=1 VLLM_NO_USAGE_STATS=1
[ $# -gt 0 ] || set -- kernels architectures sanitizer defects \
  bench extend mla profile engine throughput models offload pictures serve start \
  quality lab latents equality families checkpoints check memory soak restarts image
for section; do
  case $section in
    kernels | architectures | sanitizer | defects | bench | extend | mla | engine) ;;
    profile | throughput | models | offload | pictures | serve | start) ;;
    quality | lab | latents | transfers | image) ;;
    equality | dcp | families | checkpoints | check | memory | soak | restarts) ;;
    *) echo "gpu.sh: no section '$section'" >&2 && exit 2 ;;
  esac
done
mkdir -p "$out" || exit
if [ "$*" != pictures ] && ! "$python" -c 'import vllm.v1.attention.ops.turbo'; then
  echo "gpu.sh: apply the series to $python's vLLM first: scripts/apply.sh" >&2
  exit 1
fi

# kernels_passed [ARG]...: record it of a run of all tests, or of those of $FAMILIES.
kernels_passed() {
  # shellcheck disable=SC2086 # words are arguments
  set -- "$@" --passed ${FAMILIES:-}
  "$python" ci/native_kernels.py --record "$out/native_kernels.json" "$@" \
    --commit "$COMMIT" \
    --gpu "$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1)"
}

kernels() {
  tests=vllm_overlay/tests/kernels/turbo shard='' is_whole=1
  if [ -n "${FAMILIES:-}" ]; then
    # shellcheck disable=SC2086 # words are arguments
    tests=$("$python" ci/native_kernels.py --tests $FAMILIES) || return
  fi
  previous=
  for argument; do
    case $previous in --shard) shard=$argument ;; esac
    case $argument in -k | -m | *test_*) is_whole= ;; esac
    previous=$argument
  done
  log=$out/kernels${shard:+-${shard%/*}}.txt
  # Of the processes of -n each would take all cores for references on the CPU.
  # shellcheck disable=SC2086 # words are arguments
  PYTHONPATH=ci${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=1 \
    "$python" -m pytest -q -p no:cacheprovider -p failures_at_once -p shards "$@" \
    $tests >"$log" 2>&1
  set -- $?
  tail -n 40 "$log"
  if [ "$1" = 0 ] && [ -n "$is_whole" ]; then
    # shellcheck disable=SC2086 # words are arguments
    kernels_passed ${shard:+--shard "$shard"} || return
  fi
  return "$1"
}

architectures() {
  "$python" vllm_overlay/tests/kernels/turbo/compile_kernels.py \
    --output "$out/cuda_resources.json" --archive "$out/turbo-kernels.tar.xz" "$@"
}

# watch NAME TOOL STATUS [ARG]...: run the kernels under a tool, which is to end so.
watch() {
  log=$out/sanitizer-logs/$1.txt tool=$2 wanted=$3 padding=
  shift 3
  # An access past an allocation's end is to be in no other.
  [ "$tool" != memcheck ] || padding='--padding 4096'
  # Each of the tools beside it takes one of the ports, of which ten are tried.
  # shellcheck disable=SC2086 # words are arguments
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$sanitizer" --tool "$tool" $padding \
    --max-connections 100 --launch-timeout 0 \
    --target-processes application-only --error-exitcode 9 --print-limit 10 \
    "$python" ci/sanitize.py "$@" >"$log" 2>&1
  status=$?
  summary=$(sed -n 's/^=* \(.*SUMMARY: .*\)/\1/p' "$log" | head -n 1)
  echo "$tool${1:+ $*}: ${summary:-see $log} (status $status, to be $wanted)" |
    tee -a "$out/sanitizer.txt"
  [ "$status" -eq "$wanted" ]
}

sanitizer() {
  sanitizer=$(command -v compute-sanitizer) ||
    sanitizer=${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer
  mkdir -p "$out/sanitizer-logs" || return
  # Builds the kernels.
  "$python" ci/sanitize.py "$@" >"$out/sanitizer.txt" 2>&1 || {
    tail -n 20 "$out/sanitizer.txt"
    return 1
  }
  jobs=
  for tool in memcheck racecheck initcheck synccheck; do
    watch "$tool" "$tool" 0 "$@" &
    jobs="$jobs $!"
  done
  for defect in $("$python" ci/sanitize.py --defects); do
    watch "$defect" "${defect%%-*}" 9 --defect "$defect" &
    jobs="$jobs $!"
  done
  set -- 0
  for job in $jobs; do
    wait "$job" || set -- 1
  done
  return "$1"
}

defects() {
  "$python" ci/cuda_defects.py "$@" >"$out/defects.txt" 2>&1
  set -- $?
  tail -n 20 "$out/defects.txt"
  return "$1"
}

bench() {
  "$python" vllm_overlay/benchmarks/kernels/benchmark_turbo_decode.py \
    --output "$out/decode.jsonl" "$@"
}

extend() {
  "$python" vllm_overlay/benchmarks/kernels/benchmark_turbo_extend.py \
    --output "$out/extend.jsonl" "$@"
}

mla() {
  "$python" vllm_overlay/benchmarks/kernels/benchmark_turbo_mla.py \
    --output "$out/mla.jsonl" "$@" &&
    "$python" vllm_overlay/benchmarks/kernels/benchmark_turbo_latent_store.py \
      --output "$out/mla_store.jsonl" &&
    "$python" vllm_overlay/benchmarks/kernels/benchmark_turbo_mla_extend.py \
      --output "$out/mla_extend.jsonl"
}

profile() {
  metrics=gpu__time_duration.sum,smsp__inst_executed.sum
  metrics=$metrics,dram__bytes.sum,dram__throughput.avg.pct_of_peak_sustained_elapsed
  metrics=$metrics,smsp__issue_active.avg.pct_of_peak_sustained_active
  for pipe in alu fma fmaheavy lsu tensor; do
    name=sm__inst_executed_pipe_$pipe.avg.pct_of_peak_sustained_active
    metrics=$metrics,$name
  done
  for reason in long_scoreboard short_scoreboard math_pipe_throttle wait \
    not_selected barrier no_instruction; do
    name=smsp__average_warps_issue_stalled_${reason}_per_issue_active.ratio
    metrics=$metrics,$name
  done
  ncu --profile-from-start off --clock-control none --csv --page raw \
    --metrics "$metrics" --log-file "$out/profile-raw.csv" \
    "$python" vllm_overlay/benchmarks/kernels/benchmark_turbo_decode.py \
    --profile --arms turbo4 k4v3 turbo3 "$@" &&
    "$python" benchmarks/profile_table.py "$out/profile-raw.csv" "$out/profile.csv"
}

engine() {
  "$python" benchmarks/turbo_engine.py \
    --output "$out/engine.jsonl" --logs "$out/engine-logs" "$@"
}

throughput() {
  "$python" benchmarks/turbo_engine.py --shapes --throughput 96 4096 512 \
    --kv-cache-memory-bytes 8589934592 \
    --output "$out/engine.jsonl" --logs "$out/engine-logs" "$@"
}

offload() {
  "$python" benchmarks/turbo_offload.py --together "$out/offload-turns" \
    --kv-cache-memory-bytes 8589934592 --gpu-memory-utilization 0.25 \
    --output "$out/offload.jsonl" --logs "$out/offload-logs" "$@" &&
    "$python" vllm_overlay/benchmarks/kernels/benchmark_turbo_decode.py --rounds 50 \
      --shapes 32x32768x32x8x128 --arms turbo4 turbo4_BLHNC turbo4_BHLNC \
      --output "$out/offload_layouts.jsonl"
}

models() {
  "$python" benchmarks/turbo_models.py \
    --output "$out/models.jsonl" --logs "$out/models-logs" "$@"
}

pictures() {
  "$python" benchmarks/pictures.py "$out" "$@"
}

serve() {
  "$python" benchmarks/turbo_serve.py \
    --output "$out/serve.jsonl" --log "$out/serve.log" "$@"
}

start() {
  "$python" benchmarks/turbo_start.py \
    --output "$out/start.jsonl" --logs "$out/start-logs" "$@"
}

quality() {
  "$python" benchmarks/quality.py --jobs 5 \
    --output "$out/quality" --logs "$out/quality-logs" "$@"
}

lab() {
  "$python" tests/quality/lab/choices.py --device cuda --output "$out/lab" "$@"
}

latents() {
  "$python" tests/quality/lab/latents.py --device cuda --output "$out/lab" "$@"
}

equality() {
  "$python" benchmarks/equality.py --jobs 8 --output "$out/equality.jsonl" "$@"
}

dcp() (
  [ $# -gt 0 ] || set -- 64x32768 16x131072 16x65536 16x32768
  # Not every host has NVLink multicast.
  export NCCL_NVLS_ENABLE=0 VLLM_ALLREDUCE_USE_FLASHINFER=0 \
    VLLM_ALLREDUCE_USE_SYMM_MEM=0
  wrong=0 arm=0
  ranks='"tensor_parallel_size":2' shared='"decode_context_parallel_size":2'
  ranks="$ranks,\"compilation_config\":{\"pass_config\":{\"fuse_allreduce_rms\":false}}"
  for options in "{$ranks}" "{$ranks,$shared}" \
    "{$ranks,$shared,\"dcp_comm_backend\":\"a2a\"}"; do
    "$python" benchmarks/turbo_models.py --model benchmarks/configs/one-kv-head \
      --arms turbo4 --parts decode --shapes "$@" --engine-args "$options" \
      --output "$out/dcp.jsonl" --logs "$out/dcp-logs/$arm" || wrong=1
    arm=$((arm + 1))
  done
  "$python" benchmarks/equality.py --jobs 3 --prefill raw --output "$out/equality.jsonl" \
    --modes tensor_parallel dcp dcp_graphs dcp_chunked dcp_prefix dcp_ngram_graphs \
    dcp_mtp_graphs || wrong=1
  exit "$wrong"
)

families() {
  "$python" ci/families.py --output "$out/families.jsonl" "$@"
}

checkpoints() {
  "$python" ci/checkpoints.py --output "$out/checkpoints.jsonl" "$@"
}

check() {
  "$python" scripts/check_model.py --output "$out/check" "${@:-models/needle-qwen3}"
}

memory() {
  "$python" benchmarks/memory.py \
    --output "$out/memory.jsonl" --logs "$out/memory-logs" "$@"
}

soak() {
  "$python" benchmarks/soak.py --output "$out/soak.jsonl" "$@"
}

restarts() {
  "$python" benchmarks/soak_server.py \
    --output "$out/restarts.jsonl" --logs "$out/restarts-logs" "$@"
}

image() {
  "$python" ci/image.py --output "$out/image.jsonl" "$@"
}

transfers() {
  "$python" benchmarks/turbo_transfers.py \
    --output "$out/transfers.jsonl" --logs "$out/transfers-logs" "$@"
}

failed=
for section; do
  case $section in
    kernels) arguments=${KERNELS_ARGS:-} ;;
    architectures) arguments=${ARCHITECTURES_ARGS:-} ;;
    sanitizer) arguments=${SANITIZER_ARGS:-} ;;
    defects) arguments=${DEFECTS_ARGS:-} ;;
    bench) arguments=${BENCH_ARGS:-} ;;
    extend) arguments=${EXTEND_ARGS:-} ;;
    mla) arguments=${MLA_ARGS:-} ;;
    profile) arguments=${PROFILE_ARGS:-} ;;
    engine) arguments=${ENGINE_ARGS:-} ;;
    throughput) arguments=${THROUGHPUT_ARGS:-} ;;
    models) arguments=${MODELS_ARGS:-} ;;
    offload) arguments=${OFFLOAD_ARGS:-} ;;
    pictures) arguments=${PICTURES_ARGS:-} ;;
    serve) arguments=${SERVE_ARGS:-} ;;
    start) arguments=${START_ARGS:-} ;;
    quality) arguments=${QUALITY_ARGS:-} ;;
    lab) arguments=${LAB_ARGS:-} ;;
    latents) arguments=${LATENTS_ARGS:-} ;;
    equality) arguments=${EQUALITY_ARGS:-} ;;
    dcp) arguments=${DCP_ARGS:-} ;;
    families) arguments=${FAMILIES_ARGS:-} ;;
    checkpoints) arguments=${CHECKPOINTS_ARGS:-} ;;
    check) arguments=${CHECK_ARGS:-} ;;
    memory) arguments=${MEMORY_ARGS:-} ;;
    soak) arguments=${SOAK_ARGS:-} ;;
    restarts) arguments=${RESTARTS_ARGS:-} ;;
    image) arguments=${IMAGE_ARGS:-} ;;
    transfers) arguments=${TRANSFERS_ARGS:-} ;;
  esac
  start=$(date +%s)
  echo "[$section]"
  # shellcheck disable=SC2086 # words are arguments
  "$section" $arguments || failed="$failed $section"
  echo "[$section] took $(($(date +%s) - start)) s"
done
[ -z "$failed" ] || { echo "failed:$failed" >&2 && exit 1; }
