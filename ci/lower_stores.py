# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Lowers Triton's store of K and V to IR for an NVIDIA GPU: of few tokens and of many,
with and without an offset of K and a direction of queries.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

from lowering import lower, pretend_to_have_a_gpu, source_of

HEAD_SIZE = 64
TYPES = {
    "key_ptr": "*bf16",
    "value_ptr": "*bf16",
    "query_ptr": "*bf16",
    "kv_cache_ptr": "*u8",
    "slot_mapping_ptr": "*i64",
    "matrix_ptr": "*fp16",
    "scratch_ptr": "*fp32",
    "query_factor": "fp32",
    "inverse_sqrt_d": "fp32",
}


def cases() -> Iterator[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]]:
    """Yields names, constants, types and options of the store kernel."""
    from vllm.v1.attention.ops.turbo import interface
    from vllm.v1.attention.ops.turbo.format import TurboFormat
    from vllm.v1.attention.ops.turbo.triton import store
    from vllm.v1.attention.ops.turbo.triton.pages import tile_layout
    from vllm.v1.attention.ops.turbo.triton.store_kernel import StoreStrides

    tables = {
        "key_offset": interface.KeyOffset("*fp32", "*i32", "*i32"),
        "query_direction": interface.QueryDirection("*fp16", "*i32", "*i32"),
    }
    wanted = ((), ("key_offset",), ("key_offset", "query_direction"))
    sizes = 1, store.SMALL_BATCH + 1
    for name, names, num_tokens in product(("turbo4", "turbo3"), wanted, sizes):
        layout = TurboFormat.from_cache_dtype(name, HEAD_SIZE)
        tuning = store.default_tuning(num_tokens, HEAD_SIZE)
        constants: dict[str, Any] = dict.fromkeys(tables.keys() - set(names))
        constants |= {
            "NUM_HEADS": 8,
            "NUM_KV_HEADS": 2,
            "LAYOUT": tile_layout(layout),
            "OFFSET_SEGMENT": interface.OFFSET_SEGMENT,
            "BLOCK_T": tuning.block_t,
            "BLOCK_U": store._block_units(layout.num_units),
            "BLOCK_U_V": store._block_units(layout.num_units_v),
            "FOLD": tuning.fold,
            "value_rotation": None,
        }
        if layout.key_bits == 4 or num_tokens > 1:
            constants["scratch_ptr"] = None
        types: dict[str, Any] = TYPES | {x: tables[x] for x in names}
        types["rotated_query"] = interface.RotatedQuery("*fp16", "*fp32")
        types["strides"] = StoreStrides(*["i32"] * len(StoreStrides._fields))
        options = {"num_warps": tuning.num_warps, "enable_fp_fusion": False}
        title = ", ".join((name, f"{num_tokens} tokens", *names))
        yield title, constants, types, options


def main() -> None:
    pretend_to_have_a_gpu()
    from vllm.v1.attention.ops.turbo.triton.store_kernel import store_kernel

    for title, constants, types, options in cases():
        lower(source_of(store_kernel, constants, types), options)
        print(f"store of {title}: lowered", flush=True)


if __name__ == "__main__":
    main()
