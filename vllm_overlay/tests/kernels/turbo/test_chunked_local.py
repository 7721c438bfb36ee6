# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Chunked local attention: vLLM gives the backend one request for each chunk."""

from pathlib import Path

import pytest
import torch

from vllm.model_executor.layers.attention.chunked_local_attention import (
    create_chunked_local_attention_backend,
)
from vllm.v1.attention.backends.turbo_attn import TurboAttentionBackend
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec

from .backend_utils import (
    BLOCK_SIZE,
    HEAD_SIZE,
    KERNELS,
    NUM_KV_HEADS,
    SCALE,
    Batch,
    make_impl,
    make_vllm_config,
    prefill_modes,
    register,
    set_path,
)
from .refusal_cases import make_spec
from .utils import BF16, DEVICE, assert_by_2x_rule, load_context, requires_triton

CHUNK = 2 * BLOCK_SIZE
# Decodes around a chunk's border; prefills across several chunks, and within one.
REQUESTS = [
    (1, CHUNK - 1),
    (1, CHUNK),
    (1, 3 * CHUNK + 5),
    (CHUNK + 20, CHUNK - 10),
    (9, CHUNK + 7),
    (2 * CHUNK, 0),
]


@requires_triton
@prefill_modes
@pytest.mark.parametrize("path", ["torch", *KERNELS])
def test_each_token_sees_its_chunk(tmp_path: Path, mode, path):
    config = make_vllm_config(
        tmp_path, "turbo4", BF16, mode, max_num_batched_tokens=512
    )
    impl = make_impl(config)
    set_path(impl, path)
    register(config, impl)
    backend = create_chunked_local_attention_backend(TurboAttentionBackend, CHUNK)
    spec = make_spec(
        ChunkedLocalAttentionSpec,
        block_size=BLOCK_SIZE,
        num_kv_heads=NUM_KV_HEADS,
        head_size=HEAD_SIZE,
        attention_chunk_size=CHUNK,
    )
    builder = backend.get_builder_cls()(spec, ["layers.0.attn"], config, DEVICE)
    batch = Batch.make(impl, REQUESTS)
    output = batch.run(impl, builder.build(0, batch.common), path)
    begin = 0
    for row, (num_queries, context) in enumerate(REQUESTS):
        length = context + num_queries
        key, value = load_context(
            batch.cache, batch.table[row], length, impl.runner.layout
        )
        own = slice(begin, begin + num_queries)
        if mode == "raw":
            key = torch.cat([key[:context], batch.key[own].float()])
            value = torch.cat([value[:context], batch.value[own].float()])
        for first in range(context // CHUNK * CHUNK, length, CHUNK):
            last = min(first + CHUNK, length)
            queries = slice(
                begin + max(first, context) - context, begin + last - context
            )
            assert_by_2x_rule(
                output[queries],
                batch.query[queries],
                key[first:last],
                value[first:last],
                SCALE,
                BF16,
                rotated=True,
            )
        begin += num_queries
