# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Stores K and V by vLLM's own turboquant kernels, and reads them back.

Takes a file of K and V, each (tokens, H, D), and writes each preset's K and V to
another file. It runs on a GPU, or with TRITON_INTERPRET=1 in Triton's interpreter.
"""

import sys

import torch
import upstream

from vllm.platforms import current_platform
from vllm.triton_utils import triton
from vllm.v1.attention.ops.triton_turboquant_decode import (
    _get_layout,
    _tq_full_dequant_kv,
)
from vllm.v1.attention.ops.triton_turboquant_store import triton_turboquant_store

BLOCK_SIZE = 16


def kernel_round_trip(
    key: torch.Tensor, value: torch.Tensor, preset: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V, (T, H, D), through a cache: fp16, K still rotated if it was."""
    tokens, heads, size = key.shape
    chosen = upstream.config(preset, size)
    matrix, centroids, thresholds = upstream.tables(preset, size, key.device)
    blocks = triton.cdiv(tokens, BLOCK_SIZE)
    shape = (blocks, BLOCK_SIZE, heads, chosen.slot_size_aligned)
    cache = torch.zeros(shape, dtype=torch.uint8, device=key.device)
    triton_turboquant_store(
        key,
        value,
        cache,
        torch.arange(tokens, dtype=torch.int32, device=key.device),
        matrix,
        thresholds,
        chosen.key_mse_bits,
        chosen.key_packed_size,
        chosen.effective_value_quant_bits,
        chosen.key_fp8,
    )
    layout = _get_layout(
        size,
        chosen.key_mse_bits,
        chosen.effective_value_quant_bits,
        chosen.key_packed_size,
    )
    read = torch.zeros(2, 1, heads, tokens, size, dtype=torch.float16).to(key.device)
    _tq_full_dequant_kv[(tokens, heads)](
        cache,
        torch.arange(blocks, dtype=torch.int32, device=key.device)[None],
        centroids,
        *read,
        *read[0].stride()[:3],
        *read[1].stride()[:3],
        *cache.stride()[:3],
        blocks,
        HEAD_DIM=size,
        BLOCK_SIZE=BLOCK_SIZE,
        NUM_KV_HEADS=heads,
        MSE_BYTES=layout["mse_bytes"],
        KPS=chosen.key_packed_size,
        VQB=chosen.effective_value_quant_bits,
        VAL_DATA_BYTES=layout["val_data_bytes"],
        MSE_BITS=chosen.key_mse_bits,
        KEY_FP8=int(chosen.key_fp8),
        BLOCK_D=layout["BLOCK_D"],
        NORM_CORRECTION=int(chosen.norm_correction),
    )
    read_key, read_value = read[:, 0].transpose(1, 2)
    return read_key, read_value


def main() -> None:
    source, target = sys.argv[1:]
    vectors = torch.load(source)
    key, value = (x.to(current_platform.device_type) for x in vectors)
    read = {name: kernel_round_trip(key, value, name) for name in upstream.PRESETS}
    torch.save({name: [x.cpu() for x in pair] for name, pair in read.items()}, target)


if __name__ == "__main__":
    main()
