# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Pages of a dtype with another format are not mistaken for each other: not by NIXL's
handshake, in the offload tiers' folders, or by Mooncake's keys.
"""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker import (
    MooncakeStoreWorker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    compute_nixl_compatibility_hash,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import (
    build_offloading_config,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.utils import record_kv_cache_layout
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
    get_kv_quant_mode,
    kv_cache_format_id,
)
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.kv_offload.file_mapper import FileMapper

from ..backend_utils import (
    BLOCK_SIZE,
    HEAD_SIZE,
    NUM_KV_HEADS,
    make_layer,
    make_vllm_config,
    one_rank,
)

LAYER, WINDOWED = "layers.0.attn", "layers.1.attn"
NUM_BLOCKS = 4
# IDs of a release, of another one, and of a release without IDs.
IDS = ("1", "2", "")

MakeConfig = Callable[[str], VllmConfig]


@pytest.fixture(scope="module")
def make_config(folder: Path) -> Iterator[MakeConfig]:
    """A function from a cache dtype to the configuration of an engine with one rank."""
    configs: dict[str, VllmConfig] = {}

    def make(dtype: str) -> VllmConfig:
        if dtype not in configs:
            configs[dtype] = config = make_vllm_config(folder, dtype)
            record_kv_cache_layout(config.cache_config, "LBHNC")
        return configs[dtype]

    config = make("turbo4")
    # The backend is named, so that the series may lack the patch that selects it.
    make_layer(config, attn_backend=AttentionBackendEnum.TURBO.get_class())
    with one_rank(folder, config):
        yield make


def make_spec(
    dtype: str, format_id: str = "", slot_size: int = 68
) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=BLOCK_SIZE,
        num_kv_heads=NUM_KV_HEADS,
        head_size=HEAD_SIZE,
        dtype=torch.uint8,
        kv_quant_mode=get_kv_quant_mode(dtype),
        state_content_bytes=slot_size,
        format_id=format_id,
    )


def make_window_spec(spec: FullAttentionSpec) -> SlidingWindowSpec:
    """The same spec, for layers with a sliding window."""
    return SlidingWindowSpec(
        block_size=spec.block_size,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        dtype=spec.dtype,
        kv_quant_mode=spec.kv_quant_mode,
        state_content_bytes=spec.state_content_bytes,
        format_id=spec.format_id,
        sliding_window=8 * BLOCK_SIZE,
    )


def cache_of(*specs: FullAttentionSpec) -> KVCacheConfig:
    """A cache with a group for each spec; all groups but the first have a window."""
    first, *others = specs
    merged = [FullAttentionSpec.merge([first, first]), *map(make_window_spec, others)]
    groups = [
        KVCacheGroupSpec([name], spec) for name, spec in zip((LAYER, WINDOWED), merged)
    ]
    return KVCacheConfig(NUM_BLOCKS, [], groups)


def with_connector(config: VllmConfig, name: str, **extra: object) -> VllmConfig:
    """The configuration, changed to use this connector."""
    config.kv_transfer_config = KVTransferConfig(
        kv_connector=name,
        kv_role="kv_both",
        kv_buffer_device="cpu",
        kv_connector_extra_config=extra,
    )
    return config


def test_ids_group_no_layers():
    """IDs do not count when specs are compared to allocate pages."""
    one, two = (make_spec("turbo4", name) for name in IDS[:2])
    assert one == two and hash(one) == hash(two)


def test_ids_stay_with_specs():
    spec = make_spec("turbo4", "1")
    assert FullAttentionSpec.merge([spec, spec]).format_id == "1"
    assert spec.copy_with_new_block_size(64).format_id == "1"


def test_formats_of_groups():
    groups = [
        KVCacheGroupSpec([str(i)], make_spec("turbo4", name))
        for i, name in enumerate(("b", "", "a", "b"))
    ]
    assert kv_cache_format_id("turbo4", groups) == "turbo4.a.b"
    assert kv_cache_format_id("fp8", groups[1:2]) == "fp8"


def nixl_hash(config: VllmConfig, *specs: FullAttentionSpec) -> str:
    """The hash that a worker sends to others after it has registered its cache."""
    pytest.importorskip("nixl", reason="NIXL has no wheel for this platform")
    with_connector(config, "NixlConnector")
    connector = NixlConnector(config, KVConnectorRole.WORKER, cache_of(*specs))
    shape = NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, specs[0].state_content_size_bytes
    names = (LAYER, WINDOWED)[: len(specs)]
    connector.register_kv_caches(
        {name: torch.zeros(shape, dtype=torch.uint8) for name in names}
    )
    worker = connector.connector_worker
    assert worker is not None
    found = worker.compat_hash
    assert found is not None
    connector.shutdown()
    return found


def check_ids(tell: Callable[..., str], config: VllmConfig) -> dict[str, str]:
    """Check that each ID has a word of its own, which stays; return words by ID."""
    found = {name: tell(config, make_spec("turbo4", name)) for name in IDS}
    assert len(set(found.values())) == len(IDS)
    assert tell(config, make_spec("turbo4", IDS[0])) == found[IDS[0]]
    return found


def test_nixl_hash(make_config: MakeConfig):
    config = make_config("turbo4")
    hashes = check_ids(nixl_hash, config)
    # Without an ID the hash is that of a worker that knows no IDs.
    assert hashes[""] == compute_nixl_compatibility_hash(config, "TURBO")


def offload_folder(config: VllmConfig, *specs: FullAttentionSpec) -> str:
    with_connector(config, "OffloadingConnector", cpu_bytes_to_use=1 << 20)
    offloading = build_offloading_config(config, cache_of(*specs))
    made = OffloadingSpecFactory.create_spec(offloading)
    return FileMapper.from_offloading_spec("root", made).base_path


def test_offload_folder(make_config: MakeConfig):
    check_ids(offload_folder, make_config("turbo4"))


@pytest.fixture
def mooncake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for Mooncake's library, without a network."""

    class Store:
        def setup(self, *args: object) -> int:
            return 0

    class ReplicateConfig:
        pass

    store = ModuleType("mooncake.store")
    vars(store).update(MooncakeDistributedStore=Store, ReplicateConfig=ReplicateConfig)
    package = ModuleType("mooncake")
    vars(package).update(store=store)
    for module in (package, store):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    path = tmp_path / "mooncake.json"
    settings = {
        "metadata_server": "metadata",
        "global_segment_size": "1mb",
        "local_buffer_size": "1mb",
        "protocol": "tcp",
        "device_name": "",
        "master_server_address": "127.0.0.1:1",
    }
    path.write_text(json.dumps(settings))
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(path))


def mooncake_key(config: VllmConfig, *specs: FullAttentionSpec) -> str:
    """The key of a block of the first group, as a worker stores it."""
    with_connector(config, "MooncakeStoreConnector")
    # Not the first rank of a stage, which has a server for the scheduler.
    config.parallel_config.rank = 1
    try:
        worker = MooncakeStoreWorker(config, cache_of(*specs))
    finally:
        config.parallel_config.rank = 0
    assert len(worker.token_dbs) == len(specs)
    return worker.token_dbs[0].store_layout.key_for(0, b"hash")


def test_mooncake_keys(make_config: MakeConfig, mooncake: None):
    check_ids(mooncake_key, make_config("turbo4"))


@pytest.mark.parametrize("tell", [nixl_hash, offload_folder, mooncake_key])
def test_ids_of_all_groups_count(make_config: MakeConfig, mooncake: None, tell):
    """IDs of all groups count, because a request reads pages of all of them."""
    config = make_config("turbo4")
    pairs = [("1", "2"), ("1", "3"), ("4", "2")]
    found = {
        tell(config, *(make_spec("turbo4", name) for name in names)) for names in pairs
    }
    assert len(found) == len(pairs)


def test_mooncake_keys_of_dtypes(make_config: MakeConfig, mooncake: None):
    """Dtypes with equal page sizes have different keys; without a dtype keys stay."""
    dtypes = ("auto", "int4_per_token_head", "turbo4")
    specs = [make_spec(dtype) for dtype in dtypes]
    assert len({spec.page_size_bytes for spec in specs}) == 1
    keys = {
        dtype: mooncake_key(make_config(dtype), spec)
        for dtype, spec in zip(dtypes, specs)
    }
    assert len(set(keys.values())) == len(dtypes)
    assert "format" not in keys["auto"]


def test_other_dtypes_have_no_ids(make_config: MakeConfig):
    """Other dtypes have no IDs, so that blocks from before are still found."""
    spec = make_spec("int4_per_token_head")
    config = make_config("int4_per_token_head")
    with_connector(config, "OffloadingConnector", cpu_bytes_to_use=1 << 20)
    offloading = build_offloading_config(config, cache_of(spec))
    assert offloading.model.dtype == "int4_per_token_head"
