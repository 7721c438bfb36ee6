# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Failing KV transfers of a soak, and the connectors that they go through.

There are two kinds. A request is prefilled for an engine that never fetches the pages,
which are held until a lease ends. Or its pages are on an engine that does not exist, so
that the prompt has to be computed. Like others, both may be aborted at any time.
"""

import socket
from dataclasses import dataclass
from typing import Any

# The lease of pages that nobody fetches; NIXL renews leases in sixths of it.
LEASE_S = 6


@dataclass(frozen=True)
class Transfer:
    """A request's parameters for its connector.

    Attributes:
        kind: The kind of transfer.
        params: vLLM's `kv_transfer_params`.
        tokens: Tokens of the answer; None for as many as other answers.

    """

    kind: str
    params: dict[str, Any]
    tokens: int | None


def unanswered_port() -> tuple[socket.socket, int]:
    """Returns a port that accepts connections and never answers, and its socket."""
    listener = socket.create_server(("127.0.0.1", 0))
    return listener, listener.getsockname()[1]


def for_nobody() -> Transfer:
    """Returns a transfer to nobody: a prefill whose pages nobody fetches."""
    return Transfer("for_nobody", {"do_remote_decode": True}, 1)


def from_nobody(number: int, num_blocks: int, num_groups: int, port: int) -> Transfer:
    """Returns a transfer from an engine that does not exist."""
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "gone",
        "remote_request_id": f"gone-{number}",
        "remote_block_ids": [list(range(num_blocks))] * num_groups,
        "remote_host": "127.0.0.1",
        "remote_port": port,
        "remote_num_tokens": 0,
        "tp_size": 1,
    }
    return Transfer("from_nobody", params, None)


def transfer_config(
    transfers: float, offload_gib: float, on_cpu: bool
) -> dict[str, Any] | None:
    """Returns vLLM's `kv_transfer_config`; None if no connector is needed.

    Args:
        transfers: The share of requests that have a transfer.
        offload_gib: Host memory that pages are copied to.
        on_cpu: Whether there is no GPU.

    """
    connectors: list[dict[str, Any]] = []
    if transfers:
        connectors.append(
            {
                "kv_connector": "NixlConnector",
                "kv_role": "kv_both",
                "kv_buffer_device": "cpu" if on_cpu else "cuda",
                "kv_connector_extra_config": {"kv_lease_duration": LEASE_S},
            }
        )
    if offload_gib:
        size = int(offload_gib * 2**30)
        connectors.append(
            {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"cpu_bytes_to_use": size},
            }
        )
    if not connectors:
        return None
    if len(connectors) == 1:
        (config,) = connectors
    else:
        config = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": connectors},
        }
    return config | {"kv_load_failure_policy": "recompute"}
