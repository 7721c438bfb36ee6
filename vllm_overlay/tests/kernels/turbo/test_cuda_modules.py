# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Every module that serving asks for is among those that are built before."""

from collections.abc import Iterator
from itertools import product

import pytest
import regex as re
import torch

from vllm.v1.attention.ops.turbo.cuda import decode as cuda_decode
from vllm.v1.attention.ops.turbo.cuda import decode_columns, extend_rows, modules
from vllm.v1.attention.ops.turbo.cuda import extend as cuda_extend
from vllm.v1.attention.ops.turbo.cuda import merge as cuda_merge
from vllm.v1.attention.ops.turbo.cuda import store as cuda_store
from vllm.v1.attention.ops.turbo.cuda.build import SUPPORTED_HEAD_SIZES, CudaModule
from vllm.v1.attention.ops.turbo.cuda.modules import (
    ARCHITECTURES,
    all_modules,
    serving_modules,
)
from vllm.v1.attention.ops.turbo.format import HEAD_SIZES, TURBO_PRESETS, TurboFormat
from vllm.v1.attention.ops.turbo.kernel_choice import cuda_kernels
from vllm.v1.attention.ops.turbo.planning.extend_limits import max_extend_len
from vllm.v1.attention.ops.turbo.planning.prefill import FLASH_ATTN_MAX_HEAD_SIZE

DEVICE = torch.device("cuda", 0)
SHARED_BYTES = 232448
LAYOUT = TurboFormat.from_cache_dtype("turbo4", 128)
Asked = list[tuple[CudaModule, torch.device]]
# A GPU that has the kernels that all have.
CAPABILITY = 89


def set_capability(monkeypatch: pytest.MonkeyPatch, capability: int | None) -> None:
    """Have the GPU be one of a compute capability, whatever this machine has."""
    for kernel in (cuda_decode, cuda_extend, modules):
        monkeypatch.setattr(kernel, "capability_of", lambda device: capability)


def clear_caches() -> None:
    for load in (
        cuda_store.load,
        cuda_decode.load_instance,
        decode_columns.load,
        cuda_extend.load_instance,
        extend_rows.load,
        cuda_merge.load,
    ):
        load.cache_clear()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Asked]:
    """What is built, in order, where nothing has been loaded."""
    built: Asked = []
    attention = (cuda_decode, decode_columns, cuda_extend, extend_rows)
    for kernel in (cuda_store, *attention, cuda_merge):
        monkeypatch.setattr(kernel, "build_and_load", lambda *args: built.append(args))
    set_capability(monkeypatch, CAPABILITY)
    for kernel in (cuda_decode, cuda_extend):
        monkeypatch.setattr(kernel, "shared_memory", lambda device: SHARED_BYTES)
    clear_caches()
    yield built
    clear_caches()


def served(
    layout: TurboFormat,
    group: int,
    query_lens: range,
    extend_lens: range,
    has_key_offset: bool,
    with_window: bool,
    has_soft_cap: bool,
):
    """Ask as the entry points of the kernels do, of all batches, with newest tokens and
    without.
    """
    cuda_store.load(layout, DEVICE, has_key_offset)
    cuda_merge.load(layout.head_size, DEVICE, has_soft_cap)
    variant = has_key_offset, has_soft_cap
    if with_window:
        cuda_store.load(layout, DEVICE, has_key_offset, True)
    for query_len in query_lens:
        cuda_decode.load(layout, group * query_len, DEVICE, *variant)
    for query_len in extend_lens:
        cuda_extend.load(layout, group * query_len, DEVICE, *variant)
    capability = cuda_extend.capability_of(DEVICE)
    reason = extend_rows.outputs_unsupported_reason(layout, capability)
    if reason is None and not has_key_offset:
        for query_len in extend_lens:
            plan = extend_rows.plan_for(layout, group * query_len, with_outputs=True)
            extend_rows.load(layout, plan, DEVICE, *variant, True)


@pytest.mark.parametrize("max_query_len", [1, 2, 5, 9])
@pytest.mark.parametrize("group", [*range(1, 17), 32])
@pytest.mark.parametrize(
    "has_key_offset, has_soft_cap", [(False, False), (True, False), (False, True)]
)
@pytest.mark.parametrize("with_window", [False, True])
@pytest.mark.parametrize("capability", [CAPABILITY, 90])
def test_all_that_is_asked_for_is_listed(
    asked,
    monkeypatch,
    capability,
    group,
    max_query_len,
    has_key_offset,
    with_window,
    has_soft_cap,
):
    set_capability(monkeypatch, capability)
    longest = max_extend_len(128, group, capability)
    variant = has_key_offset, with_window, has_soft_cap
    loaders = serving_modules(LAYOUT, group, max_query_len, longest, DEVICE, *variant)
    for loader in loaders:
        loader.load()
    listed = set(asked)
    assert len(asked) == len(listed), "one is listed twice"
    clear_caches()
    asked.clear()
    query_lens, extend_lens = range(1, max_query_len + 1), range(1, longest + 1)
    served(LAYOUT, group, query_lens, extend_lens, *variant)
    assert set(asked) == listed


def test_all_widths_of_both_kernels_where_batches_have_them(asked):
    loaders = serving_modules(LAYOUT, 4, 3, max_extend_len(128, 4), DEVICE)
    assert [loader.name for loader in loaders] == [
        "store turbo4_128",
        "merge 128",
        "decode turbo4_128_4",
        "decode turbo4_128_8",
        "decode turbo4_128_16",
        "extend turbo4_128_r32",
        "extend turbo4_128_r64",
        "extend turbo4_128_r128",
    ]


def test_warpgroups_extend_where_gpus_have_them(asked):
    loaders = serving_modules(
        LAYOUT, 4, 1, max_extend_len(128, 4, 90), DEVICE, capability=90
    )
    assert [loader.name for loader in loaders[3:]] == [
        "extend_rows turbo4_128_r64",
        "extend_outputs turbo4_128_r64",
        "extend_rows turbo4_128_r128",
        "extend_outputs turbo4_128_r128",
        "extend_outputs turbo4_128_r256",
    ]
    for loader in loaders[3:]:
        loader.load()
    assert all(module.is_specific for module, _ in asked)
    assert [loader.make(SHARED_BYTES) for loader in loaders[3:]] == [
        module for module, _ in asked
    ]
    layout = TurboFormat.from_cache_dtype("turbo4", 256)
    names = [x.name for x in serving_modules(layout, 4, 1, 33, DEVICE, capability=90)]
    assert names[3:] == ["extend_rows turbo4_256_r64", "extend_rows turbo4_256_r128"]


def test_warpgroups_decode_more_queries_than_attend_at_once(asked):
    """And no other kernel those that they do."""
    names = [x.name for x in serving_modules(LAYOUT, 16, 2, 0, DEVICE, capability=90)]
    assert names[2:] == ["decode turbo4_128_16", "decode_columns turbo4_128_c32"]
    for group, own in ((16, False), (17, True), (32, True), (33, False)):
        found = serving_modules(LAYOUT, group, 1, 0, DEVICE, capability=90)
        names = [x.name for x in found[2:]]
        assert names == [
            "decode_columns turbo4_128_c32" if own else "decode turbo4_128_16"
        ]
    for capability, size in ((89, 128), (100, 128), (90, 256)):
        layout = TurboFormat.from_cache_dtype("turbo4", size)
        found = serving_modules(layout, 16, 2, 0, DEVICE, capability=capability)
        assert not any("columns" in x.name for x in found)
    for variant in ({"has_key_offset": True}, {"has_soft_cap": True}):
        found = serving_modules(LAYOUT, 16, 2, 0, DEVICE, capability=90, **variant)
        assert not any("columns" in x.name for x in found)
    assert decode_columns.module(LAYOUT).is_specific


@pytest.mark.parametrize("num_queries", [1, 16, 17, 32, 33])
@pytest.mark.parametrize(
    "capability, head_size, variant",
    [
        (90, 64, (False, False)),
        (90, 128, (False, False)),
        (90, 256, (False, False)),
        (90, 128, (True, False)),
        (90, 128, (False, True)),
        (89, 128, (False, False)),
        (100, 128, (False, False)),
        (None, 128, (False, False)),
    ],
)
def test_what_is_loaded_is_what_rounds_queries_or_does_not(
    asked, monkeypatch, capability, head_size, variant, num_queries
):
    set_capability(monkeypatch, capability)
    layout = TurboFormat.from_cache_dtype("turbo4", head_size)
    args = layout, num_queries, DEVICE, *variant
    cuda_decode.load(*args)
    ((module, _),) = asked
    is_own = capability == 90 and head_size <= 128 and variant == (False, False)
    is_own = is_own and 17 <= num_queries <= 32
    assert module.kernel == ("decode_columns" if is_own else "decode")
    assert cuda_decode.rounds_queries(*args) == (module.kernel == "decode")


def test_no_extends(asked):
    names = [loader.name for loader in serving_modules(LAYOUT, 8, 1, 0, DEVICE)]
    assert names == ["store turbo4_128", "merge 128", "decode turbo4_128_8"]


def test_heads_that_prefill_extends(asked):
    """Of them no more is built than the kernels in ``cuda_kernels`` ask for."""
    layout = TurboFormat.from_cache_dtype("turbo4", 512)
    loaders = serving_modules(layout, 8, 3, max_extend_len(512, 8), DEVICE)
    names = ["store turbo4_512", "merge 512", "decode turbo4_512_8"]
    assert [loader.name for loader in loaders] == names
    assert cuda_kernels(layout).extend_attention is None
    assert cuda_kernels(LAYOUT).extend_attention is not None


@pytest.mark.parametrize("capability", ARCHITECTURES)
def test_what_is_built_ahead_is_what_any_model_asks_for(asked, monkeypatch, capability):
    """No more, and no less, whatever heads and drafts it has."""
    set_capability(monkeypatch, capability)
    for kernel in (cuda_decode, cuda_extend):
        monkeypatch.setattr(
            kernel, "shared_memory", lambda device: ARCHITECTURES[capability]
        )
    variants = [(False, False), (True, False), (False, True)]
    for name, head_size in product(TURBO_PRESETS, SUPPORTED_HEAD_SIZES):
        layout = TurboFormat.from_cache_dtype(name, head_size)
        for (has_offset, has_cap), group in product(variants, range(1, 72, 5)):
            if has_cap and head_size > FLASH_ATTN_MAX_HEAD_SIZE:
                continue
            kernels = cuda_kernels(layout)
            longest = 0
            if kernels.extend_attention:
                longest = max_extend_len(head_size, group, capability)
            lens = range(1, 9), range(1, longest + 1)
            served(layout, group, *lens, has_offset, True, has_cap)
    assert set(all_modules(capability).values()) == {module for module, _ in asked}


@pytest.mark.parametrize("name", TURBO_PRESETS)
@pytest.mark.parametrize(
    "head_size", [size for size in HEAD_SIZES if size not in SUPPORTED_HEAD_SIZES]
)
def test_heads_that_triton_serves_have_no_module(name, head_size):
    layout = TurboFormat.from_cache_dtype(name, head_size)
    assert cuda_decode.unsupported_reason(layout)
    for make in (
        lambda: cuda_store.module(layout),
        lambda: cuda_decode.module(layout, 4, SHARED_BYTES),
    ):
        with pytest.raises(RuntimeError, match=f"head size {head_size} has no CUDA"):
            make()


def test_less_is_built_ahead_for_some_dtypes_and_head_sizes():
    some = all_modules(90, ["k4v3"], [64, 512])
    assert some.items() < all_modules(90).items()
    named = [name for name in some if not name.startswith("merge")]
    assert named and all(re.search("k4v3_(64|512)", name) for name in named)
    merges = {name for name in some if name not in named}
    assert merges == {"merge 64", "merge 64_cap", "merge 512"}


@pytest.mark.parametrize("name", TURBO_PRESETS)
@pytest.mark.parametrize("head_size", SUPPORTED_HEAD_SIZES)
@pytest.mark.parametrize(
    "has_key_offset, has_soft_cap", [(False, False), (True, False), (False, True)]
)
def test_names_are_those_of_the_modules(
    asked, name, head_size, has_key_offset, has_soft_cap
):
    """And tell all modules of a kernel apart: builds are counted by them."""
    layout = TurboFormat.from_cache_dtype(name, head_size)
    variant = has_key_offset, True, has_soft_cap
    loaders = serving_modules(layout, 1, 8, 48, DEVICE, *variant)
    for loader in loaders:
        loader.load()
    names = [f"{module.kernel} {module.instance}" for module, _ in asked]
    assert names == [loader.name for loader in loaders]
    assert [loader.make(SHARED_BYTES) for loader in loaders] == [x for x, _ in asked]
    num_extends = 0 if cuda_extend.unsupported_reason(layout) else 2
    assert len(set(names)) == len(names) == 5 + num_extends


def test_an_offset_has_modules_of_its_own_but_for_the_merge(asked):
    """So models without one are served by the same code as before."""
    names = [
        {x.name for x in serving_modules(LAYOUT, 1, 8, 48, DEVICE, has_key_offset)}
        for has_key_offset in (False, True)
    ]
    assert names[0] & names[1] == {"merge 128"}
    assert names[1] - names[0] == {f"{x}_offset" for x in names[0] - names[1]}


def test_a_soft_cap_has_modules_of_its_own_but_for_the_store(asked):
    """So models without one are served by the same code as before."""
    names = [
        {x.name for x in serving_modules(LAYOUT, 1, 8, 48, DEVICE, has_soft_cap=on)}
        for on in (False, True)
    ]
    assert names[0] & names[1] == {"store turbo4_128"}
    assert names[1] - names[0] == {f"{x}_cap" for x in names[0] - names[1]}


@pytest.mark.parametrize("has_key_offset", [False, True])
def test_a_window_has_a_module_of_its_own(asked, has_key_offset):
    """The store's; the others are as before."""
    without, with_one = (
        [x.name for x in serving_modules(LAYOUT, 1, 8, 48, DEVICE, has_key_offset, on)]
        for on in (False, True)
    )
    offset = "_offset" if has_key_offset else ""
    own = [name for name in with_one if name not in without]
    assert own == [f"store turbo4_128{offset}_window"]
    assert set(without) < set(with_one)


def test_the_current_device_unless_another_is_named(asked, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    for loader in serving_modules(LAYOUT, 4, 1, 4):
        loader.load()
    assert {device for _, device in asked} == {torch.device("cuda", 3)}


def test_each_device_has_modules_of_its_own(asked):
    """They may differ in their architecture."""
    for index in (0, 1):
        for loader in serving_modules(LAYOUT, 4, 1, 4, torch.device("cuda", index)):
            loader.load()
    assert [device.index for _, device in asked] == [0] * 4 + [1] * 4
