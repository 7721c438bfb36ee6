# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Lowers the kernels of the first turbo4 to Triton's IR for an NVIDIA GPU.

No GPU is needed. With --binary the kernels are compiled to the end, for compute
capabilities 8.0 and 9.0, which takes minutes.
"""

import argparse
from typing import Any

from lowering import lower, pretend_to_have_a_gpu, source_of
from triton import compile
from triton.backends.compiler import GPUTarget

POINTERS = {
    **dict.fromkeys(("key_ptr", "value_ptr", "gathered_key_ptr"), "*bf16"),
    **dict.fromkeys(("gathered_value_ptr", "kv_cache_ptr"), "*bf16"),
    **dict.fromkeys(("query_ptr", "partial_ptr", "lse_ptr", "output_ptr"), "*fp32"),
    **dict.fromkeys(("matrix_ptr", "inverse_ptr"), "*fp16"),
    **dict.fromkeys(("block_table_ptr", "seq_lens_ptr", "cu_lens_ptr"), "*i32"),
    **dict.fromkeys(("query_start_loc_ptr",), "*i32"),
    **dict.fromkeys(("stride_cache_block", "stride_cache_head"), "i64"),
    **dict.fromkeys(("inverse_sqrt_d", "key_gain"), "fp32"),
    "kv_cache_ptr": "*u8",
    "slot_mapping_ptr": "*i64",
}


def kernels(head_size: int) -> list[tuple[Any, dict[str, Any], dict[str, Any]]]:
    """Each kernel, its constants, and its options."""
    from vllm.v1.attention.ops.turbo.format import TurboFormat
    from vllm.v1.attention.ops.turbo.triton import decode_kernel, gather, store
    from vllm.v1.attention.ops.turbo.triton.codec import tile_layout
    from vllm.v1.attention.ops.turbo.triton.decode import default_tuning

    heads = {"NUM_HEADS": 32, "NUM_KV_HEADS": 8}
    layout = {"LAYOUT": tile_layout(TurboFormat(head_size))}
    block_n, num_stages, max_registers = default_tuning(head_size)
    decode = {**heads, **layout, "BLOCK_H": 8, "BLOCK_N": block_n}
    decode |= {"NUM_STAGES": num_stages}
    one_warp = {"num_warps": 1}
    if max_registers:
        one_warp["maxnreg"] = max_registers
    of_kv = {"NUM_KV_HEADS": 8, **layout}
    found = []
    for sliding in (False, True):
        case = {"SLIDING": sliding, "STEP_IN_BLOCK": not sliding}
        found.append((decode_kernel.decode_kernel, decode | case, one_warp))
    combine = {"NUM_HEADS": 32, "HEAD_SIZE": head_size, "BLOCK_S": 8}
    found.append((decode_kernel.combine_kernel, combine, {}))
    found.append((gather._gather_kernel, of_kv | {"BLOCK_N": 64}, {}))
    for block_t, fold in ((64, 1), (16, 8 if head_size <= 128 else 4)):
        tuning = {"BLOCK_T": block_t, "FOLD": fold}
        no_fusion = {"enable_fp_fusion": False}
        found.append((store.store_kernel, of_kv | tuning, no_fusion))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--binary", action="store_true", help="compile to the end")
    binary = parser.parse_args().binary
    pretend_to_have_a_gpu()
    for head_size in (64, 128, 256):
        for kernel, constants, options in kernels(head_size):
            source = source_of(kernel, constants, POINTERS)
            if binary:
                for capability in (80, 90):
                    target = GPUTarget("cuda", capability, 32)
                    compile(source, target, options)
            else:
                lower(source, options)
            print(f"{kernel.__name__} of heads of {head_size}: lowered", flush=True)


if __name__ == "__main__":
    main()
