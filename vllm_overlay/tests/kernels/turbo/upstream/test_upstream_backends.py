# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A backend that a model names for its layers must support the cache dtype, like one
that the selector chooses.
"""

from pathlib import Path

import pytest
import torch

from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backend import AttentionBackend, AttentionType
from vllm.v1.attention.backends.flash_attn_diffkv import FlashAttentionDiffKVBackend
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.attention.backends.triton_attn_diffkv import TritonAttentionDiffKVBackend

from ..backend_utils import make_vllm_config


def make_layer(
    folder: Path, cache_dtype: str, backend: type[AttentionBackend], **arguments
) -> Attention:
    dtype = torch.float16 if cache_dtype == "float16" else torch.bfloat16
    config = make_vllm_config(folder, cache_dtype, dtype)
    with set_current_vllm_config(config), set_default_torch_dtype(dtype):
        return Attention(
            num_heads=4,
            head_size=64,
            scale=0.125,
            num_kv_heads=2,
            cache_config=config.cache_config,
            prefix="layers.0.attn",
            attn_backend=backend,
            **arguments,
        )


UNSUPPORTED = [
    # MiMo-V2's layers name it. It took all quantised dtypes for FP8.
    (FlashAttentionDiffKVBackend, "int8_per_token_head"),
    (FlashAttentionDiffKVBackend, "turboquant_4bit_nc"),
    (TritonAttentionDiffKVBackend, "turboquant_4bit_nc"),
    (TritonAttentionBackend, "turboquant_4bit_nc"),
]


@pytest.mark.parametrize("backend, name", UNSUPPORTED)
def test_dtype_of_a_named_backend(folder, backend, name):
    message = f"layers.0.attn: .*{backend.get_name()}.*--kv-cache-dtype {name}"
    with pytest.raises(ValueError, match=message):
        make_layer(folder, name, backend)


@pytest.mark.parametrize(
    "backend, name",
    [
        (FlashAttentionDiffKVBackend, "auto"),
        (FlashAttentionDiffKVBackend, "bfloat16"),
        # Its list lacks float16, which is not a format of its own.
        (TritonAttentionDiffKVBackend, "float16"),
        (TritonAttentionDiffKVBackend, "fp8"),
        (TritonAttentionBackend, "int8_per_token_head"),
    ],
)
def test_supported_dtypes_of_a_named_backend(folder, backend, name):
    assert make_layer(folder, name, backend).attn_backend is backend


def test_encoders_have_no_cache(folder):
    encoder = dict(attn_type=AttentionType.ENCODER_ONLY)
    make_layer(folder, "turboquant_4bit_nc", TritonAttentionBackend, **encoder)
