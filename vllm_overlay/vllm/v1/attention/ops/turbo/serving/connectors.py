# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which KV connectors may move turbo pages.

A page moves as whole blocks of bytes, or is cut at a multiple of ``TILE_TOKENS``:
within a tile bytes are in the order of planes, and those of one token lie apart. What
moves single tokens of a block leaves the last tile in pieces, and nothing fails.
"""

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, NamedTuple

from vllm.config import KVTransferConfig
from vllm.logger import init_logger
from vllm.v1.attention.ops.turbo.format import TILE_TOKENS
from vllm.v1.attention.ops.turbo.reasons import CONNECTOR, Reason

logger = init_logger(__name__)


class State(Enum):
    """The knowledge of a connector."""

    RUN = "tested"
    READ = "by its source"
    REFUSED = "refused"


class Verdict(NamedTuple):
    """The knowledge of a connector, and its source or reason: a part of a sentence."""

    state: State
    reason: str


BY_NIXL = Verdict(
    State.RUN,
    "prefill and decode on two engines, on a CPU, by the host's memory, also from "
    "blocks of 16 tokens to ones of 64; and on two H200s, also from one GPU to two and "
    "from two to one",
)
OF_TOKENS = Verdict(
    State.REFUSED, "it moves tokens of partial blocks: use LMCacheMPConnector"
)

# Of each connector that vLLM registers, and of LMCache's own class of the one that runs
# in the engine's processes.
CONNECTORS: dict[str, Verdict] = {
    "NixlConnector": BY_NIXL,
    "NixlPullConnector": BY_NIXL,
    "NixlPushConnector": Verdict(
        State.RUN,
        "prefill and decode on two engines, on a CPU, by the host's memory",
    ),
    "OffloadingConnector": Verdict(
        State.RUN,
        "from the CPU's memory, on an H200; its fs tier on a CPU, between processes. "
        "Its obj and p2p tiers by their source; with canonical_layout vLLM does not "
        "start",
    ),
    "SimpleCPUOffloadConnector": Verdict(
        State.RUN, "on a CPU, from the host's memory and from a disk"
    ),
    "ExampleConnector": Verdict(
        State.RUN,
        "on a CPU. For debugging: its files do not say the dtype, a folder is for one",
    ),
    "DecodeBenchConnector": Verdict(
        State.RUN, "on a CPU and an H200. Its caches are zeros"
    ),
    "MultiConnector": Verdict(State.RUN, "on a CPU. Each of its connectors is judged"),
    "MooncakeConnector": Verdict(
        State.READ,
        "whole blocks; both engines need the same dtype, which nobody checks",
    ),
    "MooncakeStoreConnector": Verdict(State.READ, "whole blocks, also by heads"),
    "LMCacheMPConnector": Verdict(
        State.READ, "whole blocks; its keys do not say the dtype, a store is for one"
    ),
    "HF3FSKVConnector": Verdict(
        State.READ,
        "whole blocks; its keys do not say the model nor the dtype, a store is for one",
    ),
    "MoRIIOConnector": Verdict(State.READ, "whole blocks; on ROCm, which is refused"),
    "LMCacheConnectorV1": OF_TOKENS,
    "LMCacheConnectorV1Dynamic": OF_TOKENS,
    "FlexKVConnectorV1": Verdict(
        State.REFUSED, "it sizes pages by the model's dtype: use OffloadingConnector"
    ),
    "HiSparseConnector": Verdict(
        State.REFUSED, "it is for sparse attention: use OffloadingConnector"
    ),
    "ExampleHiddenStatesConnector": Verdict(
        State.REFUSED, "it reads hidden states from the cache: leave it out"
    ),
}


# Of these, those of which it is known with MLA, tested or by their source. Others move
# what all ranks have alike in ways of their own.
MLA_CONNECTORS = frozenset(
    (
        "OffloadingConnector",
        "ExampleConnector",
        "DecodeBenchConnector",
        "MultiConnector",
    )
)
UNKNOWN_WITH_MLA = "it is not known to work with MLA: use OffloadingConnector"
CANONICAL_MLA = "with MLA its pages are cut by tokens: leave out canonical_layout"


def connector_reason(name: str, instead: str) -> Reason:
    """The reason to refuse a connector."""
    return CONNECTOR.of(name=name, instead=instead)


def _connectors(transfer: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    """Each connector of a configuration, those of others among them."""
    yield transfer
    extra = transfer.get("kv_connector_extra_config") or {}
    for child in extra.get("connectors", ()):
        yield from _connectors(child)


def _mla_refusal(name: str, connector: Mapping[str, Any]) -> str | None:
    """Why a connector that is served otherwise is refused with MLA, if it is."""
    if name in CONNECTORS and name not in MLA_CONNECTORS:
        return UNKNOWN_WITH_MLA
    extra = connector.get("kv_connector_extra_config") or {}
    return CANONICAL_MLA if extra.get("canonical_layout") else None


def unsupported_connectors(
    transfer: KVTransferConfig | None, is_mla: bool = False
) -> list[Reason]:
    """Why the connectors of an engine are refused; warns of those that nobody knows.

    Args:
        transfer: The engine's configuration; None for no connector.
        is_mla: Whether the pages are of MLA.

    """
    found = []
    for each in _connectors(vars(transfer) if transfer is not None else {}):
        name = each.get("kv_connector")
        if name is None:
            continue
        verdict = CONNECTORS.get(name)
        if verdict is not None and verdict.state is State.REFUSED:
            found.append(connector_reason(name, verdict.reason))
        elif is_mla and (refusal := _mla_refusal(name, each)):
            found.append(connector_reason(name, refusal))
        elif verdict is None or each.get("kv_connector_module_path"):
            logger.warning_once(
                "KV connector %s is not known to work with turbo KV caches. It may "
                "move whole blocks of them, or halves at a multiple of %d tokens, but "
                "no single tokens.",
                name,
                TILE_TOKENS,
            )
    return found
