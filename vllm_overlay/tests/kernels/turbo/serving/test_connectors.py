# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Every KV connector has a verdict: it moves whole blocks of pages, or is refused."""

from pathlib import Path

import pytest

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import (
    NixlConnector,
    NixlPullConnector,
)
from vllm.v1.attention.ops.turbo.serving.connectors import CONNECTORS, State
from vllm.v1.kv_cache_layout import KVCacheLayout

from ..backend_utils import make_impl, make_vllm_config
from ..utils import CACHE_LAYOUTS
from .refusal_cases import multi_config, transfer_config

REFUSED = [
    name for name, verdict in CONNECTORS.items() if verdict.state is State.REFUSED
]
SERVED = [name for name in CONNECTORS if name not in REFUSED]
# LMCache's own class. Users name it with its module, so that vLLM does not register it.
OF_OTHERS = {"LMCacheConnectorV1Dynamic"}


@pytest.fixture(scope="module")
def config(folder: Path) -> VllmConfig:
    return make_vllm_config(folder)


def test_all_that_vllm_registers_are_judged():
    """A new connector of vLLM must be read or run, and added to the table."""
    assert set(KVConnectorFactory._registry) == set(CONNECTORS) - OF_OTHERS
    # NixlPullConnector's verdict also holds for NixlConnector, the same class.
    assert NixlConnector is NixlPullConnector


@pytest.mark.parametrize("name", SERVED)
def test_served(config: VllmConfig, name: str, log):
    make_impl(transfer_config(config, name))
    assert not log.warnings


def refused(name: str):
    """Expect a ValueError that names the dtype, the connector and the way out."""
    words = rf"turbo4 .*KV connector {name} \(.+: (use|leave) .+\)\.$"
    return pytest.raises(ValueError, match=words)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(config: VllmConfig, name: str):
    with refused(name):
        make_impl(transfer_config(config, name))


@pytest.mark.parametrize("name", REFUSED)
def test_refused_beside_others(config: VllmConfig, name: str):
    with refused(name):
        make_impl(multi_config(config, "NixlConnector", name))


def test_served_beside_others(config: VllmConfig, log):
    make_impl(multi_config(config, "NixlConnector", "OffloadingConnector"))
    assert not log.warnings


def test_refused_within_another_of_several(config: VllmConfig):
    inner = multi_config(config, "LMCacheConnectorV1").kv_transfer_config
    assert inner is not None
    child = {
        "kv_connector": inner.kv_connector,
        "kv_connector_extra_config": inner.kv_connector_extra_config,
    }
    outer = {"connectors": [child]}
    with refused("LMCacheConnectorV1"):
        make_impl(
            transfer_config(config, "MultiConnector", kv_connector_extra_config=outer)
        )


@pytest.mark.parametrize("name", ["OwnConnector", "NixlConnector"])
def test_connector_of_another_module(config: VllmConfig, name: str, log):
    """A connector from another module gets a warning, whatever its name."""
    make_impl(transfer_config(config, name, kv_connector_module_path="own.module"))
    (line,) = log.warnings
    assert name in line and "whole blocks" in line


def test_permuting_layouts_is_for_others(config: VllmConfig):
    """NIXL's flag needs pages with a token's heads side by side; turbo has none."""
    assert KVCacheLayout.LBNHC not in CACHE_LAYOUTS
    make_impl(transfer_config(config, "NixlConnector", enable_permute_local_kv=True))


def test_no_connector(config: VllmConfig):
    assert config.kv_transfer_config is None
    make_impl(config)
