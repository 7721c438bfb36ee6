# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""`equality.py`: the settings of a mode, and the log of its engine."""

from dataclasses import replace
from typing import Any

import pytest
from equality import build_parser, quiet_name
from scenarios import GAIN
from test_equality import BUILT
from turbo_equality.modes import BLOCK, MODES
from turbo_equality.run import (
    TURBO_DTYPES,
    built_kernels,
    child_environment,
    engine_args,
    kernel_reasons,
    room,
    unlike_asked,
    used_kernels,
    window_lengths,
)
from turbo_quality.cases import MODEL


def arguments(mode: str, on_cpu: bool, *options: str) -> dict[str, Any]:
    """The arguments of `LLM` in a mode."""
    args = build_parser().parse_args(options)
    args.on_cpu = on_cpu
    return engine_args(MODES[mode], 512, "stored", args)


@pytest.mark.parametrize("on_cpu", [False, True])
def test_no_two_modes_are_the_same_run(on_cpu):
    modes = [name for name in MODES if MODES[name].gpus == 0 or not on_cpu]
    for i, name in enumerate(modes):
        own = arguments(name, on_cpu), replace(MODES[name], args={}, gpus=0)
        for other in modes[:i]:
            theirs = arguments(other, on_cpu), replace(MODES[other], args={}, gpus=0)
            assert own != theirs, (name, other)


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_has_graphs_where_it_says_so(mode):
    options = arguments(mode, on_cpu=False)
    assert options["enforce_eager"] is not MODES[mode].graphs
    assert MODES[mode].graphs or "graphs" not in mode
    assert ("async" in mode) <= options["async_scheduling"]
    if mode.startswith("block_"):
        assert options["block_size"] == int(mode.removeprefix("block_")) != BLOCK["gpu"]


@pytest.mark.parametrize("dtype", TURBO_DTYPES)
def test_some_layers_are_not_packed(dtype):
    """So are those of the run that both modes are held to, eager and with graphs.

    The memory is that of the packed layers and of the bf16 ones.
    """
    modes = ("quiet_skipped", "skipped", "skipped_graphs")
    for mode in modes:
        assert MODES[mode].gpus == 1 and quiet_name(MODES[mode].model) == modes[0]
        options = arguments(mode, False, "--kv-cache-dtype", dtype)
        assert options["kv_cache_dtype"] == dtype
        # The trained model has eight layers, with one KV head of 128.
        assert options["kv_cache_dtype_skip_layers"] == ["0", "7"]
        a_token = 2 * 2 * 2 * 128 + 6 * 4 * 128 / GAIN[dtype]
        memory = options["kv_cache_memory_bytes"]
        assert room(options, MODEL) == pytest.approx(memory / a_token, rel=1e-6)
        # vLLM makes blocks larger until a page covers a bf16 layer's of 16 tokens.
        assert options["block_size"] * 4 * 128 / GAIN[dtype] >= 16 * 2 * 2 * 128
    assert room(arguments("batched", False), MODEL) is None


RAN = {
    "ranks": 1,
    "replays": 0,
    "block_size": 16,
    "max_num_seqs": 64,
    "async_scheduling": False,
    "turbo_prefill": "stored",
    "kv_cache_dtype_skip_layers": [],
    "tensor_parallel_size": 1,
    "enable_adaptive_verification": False,
    "turbo_window": 0,
}


@pytest.mark.parametrize(
    "mode, changes, kernels, unlike",
    [
        ("batched", {}, "CUDA", {}),
        ("batched", {}, "Triton", {"kernels": ["Triton"]}),
        ("triton", {}, "CUDA", {"kernels": ["CUDA"]}),
        ("triton", {}, "Triton", {}),
        ("batched", {"block_size": 32}, "CUDA", {"block_size": 32}),
        ("block_64", {}, "CUDA", {"block_size": 16}),
        ("async", {}, "CUDA", {"async_scheduling": False}),
        (
            "skipped",
            {"block_size": 128},
            "CUDA",
            {"kv_cache_dtype_skip_layers": []},
        ),
        (
            "batched",
            {"kv_cache_dtype_skip_layers": ["0"]},
            "CUDA",
            {"kv_cache_dtype_skip_layers": ["0"]},
        ),
        ("one_sequence", {}, "CUDA", {"max_num_seqs": 64}),
        ("batched", {"turbo_prefill": "raw"}, "CUDA", {"turbo_prefill": "raw"}),
        ("batched", {"turbo_window": "auto"}, "CUDA", {"turbo_window": "auto"}),
        (
            "tensor_parallel",
            {"tensor_parallel_size": 2},
            "CUDA",
            {"ranks": 1},
        ),
        (
            "dcp",
            {"tensor_parallel_size": 2, "ranks": 2, "decode_context_parallel_size": 1},
            "CUDA",
            {"decode_context_parallel_size": 1},
        ),
        (
            "eagle_adaptive",
            {},
            "CUDA",
            {"enable_adaptive_verification": False},
        ),
    ],
)
def test_what_an_engine_ran_as_is_held_to_what_was_asked(
    mode, changes, kernels, unlike, tmp_path
):
    options = arguments(mode, on_cpu=False)
    if MODES[mode].drafts:
        options["speculative_config"] = MODES[mode].speculative_config
    assert unlike_asked(options, RAN | changes, {kernels}, on_cpu=False) == unlike


def test_options_that_a_dtype_does_not_read_are_not_held_to_anything():
    options = arguments("batched", on_cpu=False)
    options |= {"kv_cache_dtype": "fp8", "attention_config": {}}
    ran = RAN | {"turbo_prefill": "raw", "turbo_window": "auto"}
    assert unlike_asked(options, ran, set(), on_cpu=False) == {}
    ran["block_size"] = 32
    assert unlike_asked(options, ran, set(), on_cpu=False) == {"block_size": 32}


def test_kernels_and_builds_are_read_from_the_log(tmp_path):
    log = tmp_path / "log"
    build = "INFO [build.py:1] Building the turbo CUDA kernel {} for {}; it is "
    lines = [build.format(*name.split()) + "cached afterwards." for name in BUILT]
    start = (
        "INFO [startup.py:60] KV cache turbo4: 136 bytes a token and layer (layers: "
    )
    start += "8, KV heads: 1, head size: 128; Triton kernels, because turbo_kernel is "
    log.write_text("\n".join([*lines, lines[0], start + "triton), 3.76 times fewer"]))
    assert built_kernels(log) == BUILT | {"store turbo4_128": 2}
    assert used_kernels(log) == {"Triton"}
    layers = "layers: 2, KV heads: 2, head size: 64, sliding window: 128; CUDA kernels"
    with log.open("a") as file:
        file.write(f" ({layers}, because they could be built, cached), 136 bytes")
    assert used_kernels(log) == {"Triton", "CUDA"}
    log.write_text("\n".join([*lines, lines[0], start + "triton), 3.76 times fewer"]))
    chosen = "Triton kernels, because turbo_kernel is triton"
    assert kernel_reasons(log) == [chosen]
    warned = "Triton kernels, because they cannot be loaded (IndexError: 1)."
    with log.open("a") as file:
        file.write(f"\nWARNING [choose.py:1] Turbo KV cache: {warned}")
    assert kernel_reasons(log) == [warned, chosen]


def test_windows_are_asked_for_and_told(tmp_path):
    args = build_parser().parse_args(["--window"])
    args.on_cpu = False
    options = engine_args(MODES["preempted"], 512, "raw", args)
    assert options["attention_config"]["turbo_window"] == "auto"
    assert options["block_size"] == 64
    # Four requests have room for their prompts of eight blocks, and for their windows.
    assert options["num_gpu_blocks_override"] == 4 * (8 + 1) + 1
    log = tmp_path / "log"
    start = "raw K and V; recent window: {} tokens in 8 bits\n"
    log.write_text(start.format("23") + start.format("0 or 20"))
    assert window_lengths(log) == {0, 20, 23}


def test_ranks_need_no_multicast(tmp_path):
    """Not every host has it, and other all-reduces sum in another order."""
    for name, mode in MODES.items():
        variables = child_environment(tmp_path, mode, on_cpu=False)
        for variable in ("USE_FLASHINFER", "USE_SYMM_MEM"):
            off = variables.get(f"VLLM_ALLREDUCE_{variable}") == "0"
            assert off == (mode.gpus > 1), name
