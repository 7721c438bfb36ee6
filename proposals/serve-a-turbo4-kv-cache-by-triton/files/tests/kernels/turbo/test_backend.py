# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""turbo4's backend: what it refuses, and batches of prefills and decodes."""

import pytest
import torch

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.kv_transfer import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.turbo_attn import (
    TurboAttentionBackend,
    TurboAttentionImpl,
)
from vllm.v1.attention.backends.turboquant_attn import TurboQuantMetadata
from vllm.v1.attention.selector import AttentionSelectorConfig, get_attn_backend
from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_quant_mode

from .utils import DEVICE, Sequences, assert_near, attend, engine_args, write_model

NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 4, 2, 64
SCALE = HEAD_SIZE**-0.5
ROUNDING = 3e-3  # of fp16, relative to the largest output


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    folder = write_model(tmp_path_factory.mktemp("model"))
    return EngineArgs(**engine_args(folder)).create_engine_config()


def make_impl(config: VllmConfig, **changes: object) -> TurboAttentionImpl:
    shape = (NUM_HEADS, changes.pop("head_size", HEAD_SIZE), SCALE, NUM_KV_HEADS)
    with set_current_vllm_config(config):
        return TurboAttentionImpl(*shape, kv_cache_dtype="turbo4", **changes)


class Batch:
    """Requests with cached tokens and a chunk of new ones, decodes first."""

    def __init__(
        self, lens: list[int], query_lens: list[int], window: int | None = None
    ) -> None:
        self.sequences = Sequences.make(lens, NUM_KV_HEADS, HEAD_SIZE)
        total = sum(query_lens)
        starts = torch.tensor([0, *query_lens]).cumsum(0).int()
        shape = (total, NUM_KV_HEADS, HEAD_SIZE)
        self.query = torch.randn(total, NUM_HEADS, HEAD_SIZE).half().to(DEVICE)
        self.key, self.value = torch.randn(2, *shape).half().to(DEVICE)
        num_decodes = query_lens.count(1)
        expected = []
        for row, (first, n) in enumerate(zip(starts.tolist(), query_lens)):
            chunk = slice(first, first + n)
            sides = [self.sequences.key[row], self.sequences.value[row]]
            if n > 1:
                # A chunk sees itself as computed, and the tokens before as stored.
                own = (self.key[chunk], self.value[chunk])
                cached = lens[row] - n
                sides = [
                    torch.cat([stored[:cached], raw.float().cpu()])
                    for stored, raw in zip(sides, own)
                ]
            expected.append(attend(self.query[chunk], *sides, SCALE, window))
        self.expected = torch.cat(expected)
        self.metadata = TurboQuantMetadata(
            seq_lens=self.sequences.seq_lens,
            slot_mapping=torch.empty(0),
            block_table=self.sequences.block_table,
            query_start_loc=starts.to(DEVICE),
            num_actual_tokens=total,
            max_query_len=max(query_lens),
            max_seq_len=max(lens),
            is_prefill=max(query_lens) > 1,
            num_decodes=num_decodes,
            num_decode_tokens=num_decodes,
            query_start_loc_cpu=starts,
            seq_lens_cpu=torch.tensor(lens, dtype=torch.int32),
        )

    def check(self, impl: TurboAttentionImpl) -> None:
        output = torch.empty_like(self.query)
        tensors = (self.query, self.key, self.value, self.sequences.kv_cache)
        impl.forward(torch.nn.Module(), *tensors, self.metadata, output)
        assert_near(output, self.expected, ROUNDING)


BATCHES = {
    "decodes": ([1, 17, 40], [1, 1, 1]),
    "first chunks": ([20, 3], [20, 3]),
    "chunks after cached tokens": ([48, 17], [16, 2]),
    # The longest chunk is as long as the longest sequence.
    "prefix hit beside a long first chunk": ([64, 60], [64, 9]),
    "all": ([30, 5, 64, 60, 7], [1, 1, 64, 9, 7]),
}


@pytest.mark.parametrize("window", [None, 12])
@pytest.mark.parametrize("name", BATCHES)
def test_batch(config, name, window):
    Batch(*BATCHES[name], window).check(make_impl(config, sliding_window=window))


@pytest.mark.parametrize("room, calls", [(1000, 1), (64, 3)])
def test_prefills_attend_together(config, room, calls, monkeypatch):
    """One call serves all requests whose tokens fit into the workspace."""
    impl = make_impl(config)
    impl.max_gathered = room
    count, as_before = [], impl._attend
    counted = lambda *args: count.append(1) or as_before(*args)
    monkeypatch.setattr(impl, "_attend", counted)
    Batch([40, 24, 64, 50], [8, 24, 2, 9]).check(impl)
    assert len(count) == calls


def test_slot_size():
    mode = get_kv_quant_mode("turbo4")
    sizes = {"block_size": 16, "num_kv_heads": 2, "head_size": 128}
    spec = FullAttentionSpec(**sizes, dtype=torch.uint8, kv_quant_mode=mode)
    assert TurboAttentionBackend.customize_spec(spec).page_size_bytes == 16 * 2 * 136


SELECTION = AttentionSelectorConfig(
    head_size=128, dtype=torch.bfloat16, kv_cache_dtype="turbo4", block_size=16
)


@pytest.mark.parametrize(
    "change, reason",
    [
        ({}, None),
        ({"has_sliding_window": True}, None),
        ({"head_size": 96}, "head_size not supported (supported: (64, 128, 256)"),
        ({"dtype": torch.float32}, "pass --dtype bfloat16"),
        ({"block_size": 24}, "pass a multiple of 16"),
        ({"has_sink": True}, "attention sinks not supported (use --kv-cache-dtype"),
        ({"use_mm_prefix": True}, "use --kv-cache-dtype fp8"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, "attention type AttentionType"),
        ({"use_batch_invariant": True}, "unset VLLM_BATCH_INVARIANT"),
        ({"use_kv_connector": True}, "drop --kv-transfer-config"),
        ({"use_pcp": True}, "leave out --prefill-context-parallel-size"),
        ({"use_dcp": True}, "leave out --decode-context-parallel-size"),
        ({"device_capability": DeviceCapability(7, 5)}, "compute capability not"),
        ({"kv_cache_dtype": "auto"}, "kv_cache_dtype not supported"),
    ],
)
def test_selection(change, reason):
    arguments = {"device_capability": DeviceCapability(9, 0), **SELECTION._asdict()}
    found = TurboAttentionBackend.validate_configuration(**arguments | change)
    assert bool(found) == (reason is not None)
    assert reason is None or any(reason in text for text in found)


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"alibi_slopes": [0.5]}, "alibi_slopes"),
        ({"logits_soft_cap": 30.0}, "logits_soft_cap"),
        ({"sinks": torch.zeros(4)}, "sinks"),
        ({"kv_sharing_target_layer_name": "layer"}, "kv_sharing_target_layer_name"),
        ({"attn_type": AttentionType.ENCODER}, "encoder attention"),
        ({"head_size": 80}, "head_size 80"),
        ({"head_size_v": 32}, "head_size_v"),
    ],
)
def test_layer_is_refused(config, change, reason):
    with pytest.raises(ValueError, match=f"turbo4 does not support {reason} .*fp8"):
        make_impl(config, **change)


@pytest.mark.parametrize(
    "name, value, way_out",
    [
        ("decode_context_parallel_size", 2, "leave out --decode-context"),
        ("enable_dbo", True, "leave out --enable-dbo"),
    ],
)
def test_parallelism_is_refused(config, monkeypatch, name, value, way_out):
    monkeypatch.setattr(config.parallel_config, name, value)
    with pytest.raises(ValueError, match=way_out):
        make_impl(config)


def test_drafts_are_refused(config):
    drafts = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}
    args = EngineArgs(**engine_args(config.model_config.model, **drafts))
    with pytest.raises(ValueError, match="--speculative-config .leave it out, or use"):
        make_impl(args.create_engine_config())


def select(config: VllmConfig, **layer: bool) -> type:
    with set_current_vllm_config(config):
        return get_attn_backend(128, torch.bfloat16, "turbo4", **layer)


@pytest.mark.parametrize("name, reason", [("use_mla", "MLA"), ("use_sparse", "sparse")])
def test_other_layers_are_refused(config, name, reason):
    with pytest.raises(ValueError, match=f"turbo4: .*{reason} not supported .use --"):
        select(config, **{name: True})


def test_another_backend_is_refused(config, monkeypatch):
    named = AttentionBackendEnum.FLASH_ATTN
    monkeypatch.setattr(config.attention_config, "backend", named)
    with pytest.raises(ValueError, match="FLASH_ATTN .drop --attention-backend"):
        select(config)


def test_connectors_are_refused(config, monkeypatch):
    transfer = KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")
    monkeypatch.setattr(config, "kv_transfer_config", transfer)
    with pytest.raises(ValueError, match="drop --kv-transfer-config"):
        select(config)


def test_backend_is_chosen_by_the_dtype(config):
    assert select(config) is TurboAttentionBackend
