# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The KV connectors that may move turbo pages.

A page moves as whole blocks of bytes, or is cut at multiples of ``TILE_TOKENS`` tokens.
Within a tile bytes are in the order of planes, so the bytes of one token are not
adjacent. A connector that moves single tokens of a block breaks the last tile, and
nothing fails.
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
    """The way in which it is known whether a connector works."""

    RUN = "tested"
    READ = "by its source"
    REFUSED = "refused"


class Verdict(NamedTuple):
    """A verdict on a connector, and its scope or reason: a part of a sentence."""

    state: State
    reason: str


BY_NIXL = Verdict(
    State.RUN,
    "prefill and decode on two engines: on a CPU, also with other block sizes, and on "
    "GPUs, also with other tensor-parallel sizes",
)
OF_TOKENS = Verdict(
    State.REFUSED, "it moves tokens of partial blocks: use LMCacheMPConnector"
)

# The verdict on each connector that vLLM registers, and on LMCache's own class of
# LMCacheConnectorV1.
CONNECTORS: dict[str, Verdict] = {
    "NixlConnector": BY_NIXL,
    "NixlPullConnector": BY_NIXL,
    "NixlPushConnector": Verdict(
        State.RUN,
        "prefill and decode on two engines, on a CPU",
    ),
    "OffloadingConnector": Verdict(
        State.RUN,
        "from the host's memory, on a GPU; its fs tier on a CPU; its obj and p2p tiers "
        "by their source. vLLM does not start with canonical_layout",
    ),
    "SimpleCPUOffloadConnector": Verdict(
        State.RUN, "on a CPU, from the host's memory and from a disk"
    ),
    "ExampleConnector": Verdict(
        State.RUN,
        "on a CPU. For debugging: its files do not have the dtype, so a folder is for "
        "one dtype",
    ),
    "DecodeBenchConnector": Verdict(
        State.RUN, "on a CPU and a GPU. Its caches are zeros"
    ),
    "MultiConnector": Verdict(State.RUN, "on a CPU. Each of its connectors is checked"),
    "MooncakeConnector": Verdict(
        State.READ,
        "whole blocks; both engines need the same dtype, which it does not check",
    ),
    "MooncakeStoreConnector": Verdict(State.READ, "whole blocks, also by heads"),
    "LMCacheMPConnector": Verdict(
        State.READ,
        "whole blocks; its keys do not have the dtype, so a store is for one dtype",
    ),
    "HF3FSKVConnector": Verdict(
        State.READ,
        "whole blocks; its keys have neither model nor dtype, so a store is for one "
        "of each",
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


# The connectors that are known to work with MLA, tested or by their source. Others have
# special ways to move the latents, which all ranks have.
MLA_CONNECTORS = frozenset(
    (
        "OffloadingConnector",
        "ExampleConnector",
        "DecodeBenchConnector",
        "MultiConnector",
    )
)
# ExampleConnector takes the keys of indexers for K and V.
SPARSE_MLA_CONNECTORS = frozenset(("OffloadingConnector", "MultiConnector"))
UNKNOWN_WITH_MLA = "it is not known to work with MLA: use OffloadingConnector"
UNKNOWN_WITH_SPARSE_MLA = (
    "it is not known to work with sparse MLA: use OffloadingConnector"
)
CANONICAL_MLA = "with MLA its pages are cut by tokens: leave out canonical_layout"


def connector_reason(name: str, instead: str) -> Reason:
    """The reason to refuse a connector."""
    return CONNECTOR.of(name=name, instead=instead)


def _connectors(transfer: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    """Each connector of a configuration, nested ones included."""
    yield transfer
    extra = transfer.get("kv_connector_extra_config") or {}
    for child in extra.get("connectors", ()):
        yield from _connectors(child)


def _mla_refusal(
    name: str, connector: Mapping[str, Any], is_sparse: bool
) -> str | None:
    """The reason to refuse a connector with MLA alone; None if it is served."""
    if name in CONNECTORS and name not in MLA_CONNECTORS:
        return UNKNOWN_WITH_MLA
    if is_sparse and name in CONNECTORS and name not in SPARSE_MLA_CONNECTORS:
        return UNKNOWN_WITH_SPARSE_MLA
    extra = connector.get("kv_connector_extra_config") or {}
    return CANONICAL_MLA if extra.get("canonical_layout") else None


def unsupported_connectors(
    transfer: KVTransferConfig | None, is_mla: bool = False, is_sparse: bool = False
) -> list[Reason]:
    """The reasons to refuse the connectors of an engine; warns of unknown ones.

    Args:
        transfer: The engine's configuration; None for no connector.
        is_mla: Whether the pages hold MLA's latents.
        is_sparse: Whether an indexer has pages beside them.

    """
    found = []
    for each in _connectors(vars(transfer) if transfer is not None else {}):
        name = each.get("kv_connector")
        if name is None:
            continue
        verdict = CONNECTORS.get(name)
        if verdict is not None and verdict.state is State.REFUSED:
            found.append(connector_reason(name, verdict.reason))
        elif is_mla and (refusal := _mla_refusal(name, each, is_sparse)):
            found.append(connector_reason(name, refusal))
        elif verdict is None or each.get("kv_connector_module_path"):
            logger.warning_once(
                "KV connector %s is not known to work with turbo KV caches. It may "
                "move whole blocks, or blocks cut at multiples of %d tokens, but not "
                "single tokens.",
                name,
                TILE_TOKENS,
            )
    return found
