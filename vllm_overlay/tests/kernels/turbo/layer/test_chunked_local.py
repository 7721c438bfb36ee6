# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Chunked local attention: vLLM gives the backend one request for each chunk."""

import torch

from vllm.config import VllmConfig
from vllm.model_executor.layers.attention.chunked_local_attention import (
    create_chunked_local_attention_backend,
)
from vllm.v1.attention.backends.turbo_attn import (
    TurboAttentionBackend,
    TurboAttentionImpl,
    TurboMetadata,
)
from vllm.v1.attention.ops.turbo import interface
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec

from ..attention_utils import check_request
from ..backend_utils import (
    BLOCK_SIZE,
    all_paths,
    make_impl,
    make_vllm_config,
    prefill_modes,
    register,
    rounds_queries,
)
from ..batch_utils import Batch
from ..serving.refusal_cases import make_spec
from ..utils import BF16, DEVICE, load_context

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


def build_chunked(
    config: VllmConfig, impl: TurboAttentionImpl, batch: Batch
) -> TurboMetadata:
    """Metadata of a batch, made by the builder of vLLM's chunked local attention."""
    register(config, impl)
    backend = create_chunked_local_attention_backend(TurboAttentionBackend, CHUNK)
    spec = make_spec(
        ChunkedLocalAttentionSpec,
        block_size=BLOCK_SIZE,
        num_kv_heads=impl.num_kv_heads,
        head_size=impl.head_size,
        attention_chunk_size=CHUNK,
    )
    builder = backend.get_builder_cls()(spec, ["layers.0.attn"], config, DEVICE)
    return builder.build(0, batch.common)


def check_chunks(impl: TurboAttentionImpl, batch: Batch, output: torch.Tensor) -> None:
    """Compare each request to attention of each token over its chunk.

    A decode's query is rounded as in ``Batch.check``.
    """
    runner = impl.runner
    decode_lens = [n for n, _ in batch.requests if n <= runner.max_query_len]
    is_rounded = rounds_queries(runner, decode_lens)
    begin = 0
    for row, (num_queries, context) in enumerate(batch.requests):
        length = context + num_queries
        key, value = load_context(batch.cache, batch.table[row], length, runner.layout)
        own = slice(begin, begin + num_queries)
        shift = torch.zeros_like(key)
        table = runner.scoring.key_offset
        if table is not None:
            # A chunk is a sequence of its own for the layer.
            places = torch.arange(length) % CHUNK
            shift = table[interface.offset_rows(places, table)].to(key)
        key += shift
        if not runner.stored:
            key[context:], value[context:] = batch.key[own], batch.value[own]
            shift[context:] = 0
        is_decode = row < len(decode_lens) and runner.kernels is not None
        for first in range(context // CHUNK * CHUNK, length, CHUNK):
            last = min(first + CHUNK, length)
            queries = slice(begin + max(first - context, 0), begin + last - context)
            seen = batch.query[queries], key[first:last], value[first:last]
            num_raw = 0 if runner.stored else last - max(first, context)
            check_request(
                output[queries],
                *seen,
                impl.scale,
                runner.shape.dtype,
                num_raw if is_decode else None,
                is_rounded,
                shift[first:last],
            )
        begin = own.stop


@prefill_modes
@all_paths
def test_each_token_sees_its_chunk(folder, mode, path):
    config = make_vllm_config(folder, "turbo4", BF16, mode, max_num_batched_tokens=512)
    impl = make_impl(config, path=path)
    batch = Batch.make(impl, REQUESTS)
    output = batch.run(impl, build_chunked(config, impl, batch))
    check_chunks(impl, batch, output)
