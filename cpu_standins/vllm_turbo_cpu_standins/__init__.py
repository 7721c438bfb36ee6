# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""PyTorch stand-ins for the native CPU ops that vLLM's GPU wheel lacks."""

import gc
import os

# Objects that are made before Python looks for garbage among the youngest, and searches
# of each generation before one of the next. Python's own first number is 700.
THRESHOLD = (100_000, 50, 100)


def collect_seldom() -> None:
    """Has Python look for garbage less often.

    vLLM's import makes a million objects that stay. Searches for garbage among them are
    a fifth of its time, and tests import vLLM in dozens of processes.
    """
    gc.set_threshold(*THRESHOLD)


def have_no_amx() -> None:
    """Has vLLM take the same path on every CPU: AMX is for ops that the wheel lacks."""
    import torch

    torch.cpu._is_amx_tile_supported = lambda: False


def register() -> list[str]:
    """Registers the missing ops, if vLLM runs on its CPU platform.

    Models' classes are then inspected without another process. Where Triton's
    interpreter runs the kernels, it is made faster.

    vLLM calls this once in every process; a second call finds nothing missing.

    Returns:
        The names registered by this call.

    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return []
    from vllm_turbo_cpu_standins.inspection import inspect_here
    from vllm_turbo_cpu_standins.registry import register_missing

    inspect_here()
    if os.environ.get("TRITON_INTERPRET") == "1":
        from vllm_turbo_cpu_standins.interpreter import quicken

        quicken()
    # A native CPU build registers its ops on this import, so look only after it.
    current_platform.import_kernels()
    registered = register_missing()
    if registered:
        from vllm_turbo_cpu_standins import quantization

        have_no_amx()
        quantization.multiply_fp8_without_onednn()
        quantization.multiply_halves_in_fp32()
    if "cpu_attention_with_kv_cache" in registered:
        from vllm_turbo_cpu_standins.attention import serve_any_cpu

        serve_any_cpu()
    if "mamba_chunk_scan_fwd_cpu" in registered:
        from vllm_turbo_cpu_standins.states import keep_states_of_chunks

        keep_states_of_chunks()
    if "chunk_gated_delta_rule_cpu" in registered:
        from vllm_turbo_cpu_standins.delta_nets import serve_fp32

        serve_fp32()
    return registered
