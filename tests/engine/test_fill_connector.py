# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The prompts that the connector of benchmarks reports as cached."""

import pytest
from fill_connector import COMPUTED, FillUnlessToldConnector

from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.decode_bench_connector import (
    DecodeBenchConnectorScheduler,
)
from vllm.v1.request import Request


@pytest.mark.parametrize(
    "params, filled", [(None, 99), ({}, 99), (COMPUTED["kv_transfer_params"], 0)]
)
def test_filled_unless_told(params: dict | None, filled: int) -> None:
    connector = object.__new__(FillUnlessToldConnector)
    scheduler = object.__new__(DecodeBenchConnectorScheduler)
    scheduler._filled_requests = set()
    connector.connector_scheduler = scheduler
    sampling = SamplingParams(extra_args={"kv_transfer_params": params})
    request = Request("a", [0] * 100, sampling, None)
    assert connector.get_num_new_matched_tokens(request, 0) == (filled, False)
