# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Refusals of turbo4 at start-up, and the way out that each message names."""

from typing import TYPE_CHECKING

from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.ops.turbo.format import HEAD_SIZES

if TYPE_CHECKING:
    from vllm.config import VllmConfig

OTHER_DTYPE = "use --kv-cache-dtype fp8 or auto"
# The way out of a reason of ``AttentionBackend.validate_configuration``.
WAYS_OUT = {
    "dtype not supported": "pass --dtype bfloat16",
    "head_size not supported": f"supported: {HEAD_SIZES}; {OTHER_DTYPE}",
    "block_size not supported": "pass a multiple of 16, or leave out --block-size",
    "batch invariance not supported": "unset VLLM_BATCH_INVARIANT",
    "KV connector not supported": f"drop --kv-transfer-config, or {OTHER_DTYPE}",
    "DCP not supported": "leave out --decode-context-parallel-size",
    "PCP not supported": "leave out --prefill-context-parallel-size",
}


def refuse_unsupported(
    config: "VllmConfig", head_size: int, attn_type: str, arguments: dict[str, object]
) -> None:
    """Refuse what no selection of a backend asks for.

    Args:
        config: The engine's configuration.
        head_size: The layer's.
        attn_type: The layer's.
        arguments: Arguments of the layer that have to be None.

    Raises:
        ValueError: Something is not supported.

    """
    found = [
        f"{name} ({OTHER_DTYPE})" for name, x in arguments.items() if x is not None
    ]
    if attn_type != AttentionType.DECODER:
        found.append(f"{AttentionType(attn_type).value} attention ({OTHER_DTYPE})")
    if head_size not in HEAD_SIZES:
        found.append(f"head_size {head_size} (supported: {HEAD_SIZES}; {OTHER_DTYPE})")
    if config.speculative_config is not None:
        # TurboQuant's metadata has wrong lengths of drafts in CUDA graphs.
        found.append(f"--speculative-config (leave it out, or {OTHER_DTYPE})")
    if config.parallel_config.decode_context_parallel_size > 1:
        found.append("DCP (leave out --decode-context-parallel-size)")
    if config.parallel_config.use_ubatching:
        found.append("micro-batches (leave out --enable-dbo and --ubatch-size)")
    if found:
        raise ValueError(f"--kv-cache-dtype turbo4 does not support {'; '.join(found)}")
