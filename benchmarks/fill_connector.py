# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A KV connector for benchmarks: prompts count as cached, unless a request objects.

It derives from vLLM's DecodeBenchConnector, which fills the blocks of all prompts with
a constant. A worker imports it by `kv_connector_module_path`.
"""

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.decode_bench_connector import (
    DecodeBenchConnector,
)

if TYPE_CHECKING:
    from vllm.v1.request import Request

# `SamplingParams.extra_args` of a prompt that has to be computed.
COMPUTED: dict[str, Any] = {"kv_transfer_params": {"computed": True}}


class FillUnlessToldConnector(DecodeBenchConnector):
    """Computes the prompts of requests with `COMPUTED`, and fills the others'."""

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if (request.kv_transfer_params or {}).get("computed"):
            return 0, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)
