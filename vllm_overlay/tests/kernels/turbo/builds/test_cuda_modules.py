# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Every module that serving asks for is in the list of modules that are built ahead."""

from collections.abc import Iterator
from itertools import product

import pytest
import regex as re
import torch

from vllm.v1.attention.ops.turbo.choose import cuda_kernels
from vllm.v1.attention.ops.turbo.cuda import decode as cuda_decode
from vllm.v1.attention.ops.turbo.cuda import extend_mma, extend_wgmma, family
from vllm.v1.attention.ops.turbo.cuda.build import SUPPORTED_HEAD_SIZES, CudaModule
from vllm.v1.attention.ops.turbo.cuda.decode import DECODE
from vllm.v1.attention.ops.turbo.cuda.decode_wgmma import DECODE_WGMMA
from vllm.v1.attention.ops.turbo.cuda.extend_mma import EXTEND_MMA
from vllm.v1.attention.ops.turbo.cuda.extend_wgmma import OUTPUTS
from vllm.v1.attention.ops.turbo.cuda.family import (
    ARCHITECTURES,
    Demand,
    ServingModule,
    load_instance,
    modules_for,
)
from vllm.v1.attention.ops.turbo.cuda.merge import MERGE
from vllm.v1.attention.ops.turbo.cuda.modules import FAMILIES, all_modules
from vllm.v1.attention.ops.turbo.cuda.store import STORE
from vllm.v1.attention.ops.turbo.format import HEAD_SIZES, TURBO_PRESETS, TurboFormat
from vllm.v1.attention.ops.turbo.interface import PLAIN, Variant
from vllm.v1.attention.ops.turbo.planning.extend_limits import max_extend_len
from vllm.v1.attention.ops.turbo.planning.prefill import FLASH_ATTN_MAX_HEAD_SIZE

from ..utils import CUDA_HEAD_SIZES

DEVICE = torch.device("cuda", 0)
SHARED_BYTES = 232448
LAYOUT = TurboFormat.from_cache_dtype("turbo4", 128)
Asked = list[tuple[CudaModule, torch.device]]
# A GPU with only the kernels that every GPU has.
CAPABILITY = 89
OFFSET, CAP = Variant(key_offset=True), Variant(soft_cap=True)
# A pass of text finds an offset and a direction of queries.
DIRECTION = OFFSET._replace(query_direction=True)
VARIANTS = [PLAIN, OFFSET, CAP, DIRECTION]
variants = pytest.mark.parametrize("variant", VARIANTS)


def set_capability(monkeypatch: pytest.MonkeyPatch, capability: int | None) -> None:
    """Have the GPU report a compute capability, on any machine."""
    for module in (cuda_decode, extend_mma, family):
        monkeypatch.setattr(module, "capability_of", lambda device: capability)


def serving(
    layout: TurboFormat,
    group: int,
    max_query_len: int,
    max_extend_len: int,
    capability: int | None = None,
    variant: Variant = PLAIN,
    device: torch.device | None = DEVICE,
) -> list[ServingModule]:
    """The modules that a layer's batches need: see ``Demand``."""
    demand = Demand(group, max_query_len, max_extend_len, capability, variant)
    return modules_for(FAMILIES, layout, demand, device)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Asked]:
    """Modules and devices of builds, in order; nothing is loaded before."""
    built: Asked = []
    monkeypatch.setattr(family, "build_and_load", lambda *args: built.append(args))
    monkeypatch.setattr(family, "shared_memory", lambda device: SHARED_BYTES)
    set_capability(monkeypatch, CAPABILITY)
    load_instance.cache_clear()
    yield built
    load_instance.cache_clear()


def served(
    layout: TurboFormat,
    group: int,
    query_lens: range,
    extend_lens: range,
    variant: Variant,
):
    """Load the modules that the kernels' entry points load, for all batches, with and
    without raw tokens.
    """
    STORE.load(layout, None, DEVICE, variant._replace(tail=False))
    STORE.load(layout, None, DEVICE, variant)
    MERGE.load(layout.head_size, None, DEVICE, variant)
    for query_len in query_lens:
        cuda_decode.load(layout, group * query_len, DEVICE, variant)
    if EXTEND_MMA.refusal(layout):
        return
    for query_len in extend_lens:
        extend_mma.load(layout, group * query_len, DEVICE, variant)
    capability = extend_mma.capability_of(DEVICE)
    reason = OUTPUTS.unsupported_reason(layout, capability)
    if reason is None:
        for query_len in extend_lens:
            plan = extend_wgmma.plan_for(layout, group * query_len, with_outputs=True)
            OUTPUTS.load(layout, plan, DEVICE, variant)


@pytest.mark.parametrize("max_query_len", [1, 2, 5, 9])
@pytest.mark.parametrize("group", [*range(1, 17), 32])
@variants
@pytest.mark.parametrize("with_tail", [False, True])
@pytest.mark.parametrize("capability", [CAPABILITY, 90])
def test_all_that_is_asked_for_is_listed(
    asked, monkeypatch, capability, group, max_query_len, variant, with_tail
):
    set_capability(monkeypatch, capability)
    longest = max_extend_len(128, group, capability)
    variant = variant._replace(tail=with_tail)
    for loader in serving(LAYOUT, group, max_query_len, longest, variant=variant):
        loader.load()
    listed = set(asked)
    assert len(asked) == len(listed), "a module is listed twice"
    load_instance.cache_clear()
    asked.clear()
    query_lens, extend_lens = range(1, max_query_len + 1), range(1, longest + 1)
    served(LAYOUT, group, query_lens, extend_lens, variant)
    assert set(asked) == listed


def test_head_sizes_of_the_tests_are_those_of_the_kernels():
    assert CUDA_HEAD_SIZES == SUPPORTED_HEAD_SIZES


def test_all_widths_of_both_kernels_where_batches_have_them(asked):
    loaders = serving(LAYOUT, 4, 3, max_extend_len(128, 4))
    assert [loader.name for loader in loaders] == [
        "store turbo4_128",
        "merge 128",
        "decode turbo4_128_4",
        "decode turbo4_128_8",
        "decode turbo4_128_16",
        "extend_mma turbo4_128_r32",
        "extend_mma turbo4_128_r64",
        "extend_mma turbo4_128_r128",
    ]


def test_warpgroups_extend_where_gpus_have_them(asked):
    loaders = serving(LAYOUT, 4, 1, max_extend_len(128, 4, 90), 90)
    assert [loader.name for loader in loaders[3:]] == [
        "extend_wgmma turbo4_128_r64",
        "extend_wgmma turbo4_128_r128",
        "extend_outputs turbo4_128_r64",
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
    names = [x.name for x in serving(layout, 4, 1, 33, 90)]
    assert names[3:] == ["extend_wgmma turbo4_256_r64", "extend_wgmma turbo4_256_r128"]


def test_warpgroups_decode_more_queries_than_attend_at_once(asked):
    """Warpgroups decode 17 to 32 queries, for which no other kernel is built."""
    names = [x.name for x in serving(LAYOUT, 16, 2, 0, 90)]
    assert names[2:] == ["decode turbo4_128_16", "decode_wgmma turbo4_128_c32"]
    for group, own in ((16, False), (17, True), (32, True), (33, False)):
        found = serving(LAYOUT, group, 1, 0, 90)
        names = [x.name for x in found[2:]]
        assert names == [
            "decode_wgmma turbo4_128_c32" if own else "decode turbo4_128_16"
        ]
    for capability, size in ((89, 128), (100, 128), (90, 256)):
        layout = TurboFormat.from_cache_dtype("turbo4", size)
        found = serving(layout, 16, 2, 0, capability)
        assert not any("decode_wgmma" in x.name for x in found)
    names = [x.name for x in serving(LAYOUT, 16, 2, 0, 90, OFFSET)]
    assert names[2:] == [
        "decode turbo4_128_16_offset",
        "decode_wgmma turbo4_128_c32_offset",
    ]
    found = serving(LAYOUT, 16, 2, 0, 90, CAP)
    assert not any("decode_wgmma" in x.name for x in found)
    assert DECODE_WGMMA.module(LAYOUT, None).is_specific


@pytest.mark.parametrize("num_queries", [1, 16, 17, 32, 33])
@pytest.mark.parametrize(
    "capability, head_size, variant",
    [
        (90, 64, PLAIN),
        (90, 128, PLAIN),
        (90, 256, PLAIN),
        (90, 128, OFFSET),
        (90, 128, CAP),
        (89, 128, PLAIN),
        (100, 128, PLAIN),
        (None, 128, PLAIN),
    ],
)
def test_the_loaded_module_rounds_queries_or_does_not(
    asked, monkeypatch, capability, head_size, variant, num_queries
):
    set_capability(monkeypatch, capability)
    layout = TurboFormat.from_cache_dtype("turbo4", head_size)
    args = layout, num_queries, DEVICE, variant
    cuda_decode.load(*args)
    ((module, _),) = asked
    is_own = capability == 90 and head_size <= 128 and variant != CAP
    is_own = is_own and 17 <= num_queries <= 32
    assert module.kernel == ("decode_wgmma" if is_own else "decode")
    assert cuda_decode.rounds_queries(*args) == (module.kernel == "decode")


def test_no_extends(asked):
    names = [loader.name for loader in serving(LAYOUT, 8, 1, 0)]
    assert names == ["store turbo4_128", "merge 128", "decode turbo4_128_8"]


def test_heads_that_prefill_extends(asked):
    """Heads of 512 have no extend module, as ``cuda_kernels`` has no such kernel."""
    layout = TurboFormat.from_cache_dtype("turbo4", 512)
    loaders = serving(layout, 8, 3, max_extend_len(512, 8))
    names = ["store turbo4_512", "merge 512", "decode turbo4_512_8"]
    assert [loader.name for loader in loaders] == names
    assert cuda_kernels(layout).extend_attention is None
    assert cuda_kernels(LAYOUT).extend_attention is not None


@pytest.mark.parametrize("capability", ARCHITECTURES)
def test_modules_built_ahead_are_those_of_all_models(asked, monkeypatch, capability):
    """The modules built ahead are exactly those that some model asks for."""
    set_capability(monkeypatch, capability)
    monkeypatch.setattr(family, "shared_memory", lambda _: ARCHITECTURES[capability])
    for name, head_size in product(TURBO_PRESETS, SUPPORTED_HEAD_SIZES):
        layout = TurboFormat.from_cache_dtype(name, head_size)
        for variant, group in product(VARIANTS, range(1, 72, 5)):
            if variant.soft_cap and head_size > FLASH_ATTN_MAX_HEAD_SIZE:
                continue
            kernels = cuda_kernels(layout)
            longest = 0
            if kernels.extend_attention:
                longest = max_extend_len(head_size, group, capability)
            lens = range(1, 9), range(1, longest + 1)
            served(layout, group, *lens, variant._replace(tail=True))
    assert set(all_modules(capability).values()) == {module for module, _ in asked}


@pytest.mark.parametrize("name", TURBO_PRESETS)
@pytest.mark.parametrize(
    "sizes, words",
    [((n,), str(n)) for n in HEAD_SIZES if n not in SUPPORTED_HEAD_SIZES]
    + [((128, 64), "128 of K and 64 of V"), ((192, 128), "192 of K and 128 of V")],
)
def test_heads_that_triton_serves_have_no_module(name, sizes, words):
    layout = TurboFormat.from_cache_dtype(name, *sizes)
    assert DECODE.unsupported_reason(layout, CAPABILITY)
    for make in (
        lambda: STORE.module(layout, None),
        lambda: DECODE.module(layout, 4, shared_bytes=SHARED_BYTES),
    ):
        with pytest.raises(RuntimeError, match=f"head size {words} has no CUDA"):
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
@variants
def test_names_are_those_of_the_modules(asked, name, head_size, variant):
    """Names are unique, because builds are counted by name."""
    layout = TurboFormat.from_cache_dtype(name, head_size)
    variant = variant._replace(tail=True)
    loaders = serving(layout, 1, 8, 48, variant=variant)
    for loader in loaders:
        loader.load()
    names = [f"{module.kernel} {module.instance}" for module, _ in asked]
    assert names == [loader.name for loader in loaders]
    assert [loader.make(SHARED_BYTES) for loader in loaders] == [x for x, _ in asked]
    num_extends = 0 if EXTEND_MMA.refusal(layout) else 2
    assert len(set(names)) == len(names) == 5 + num_extends


@pytest.mark.parametrize(
    "variant, suffix, shared",
    [(OFFSET, "_offset", "merge 128"), (CAP, "_cap", "store turbo4_128")],
    ids=["offset", "cap"],
)
def test_a_variant_has_modules_of_its_own(asked, variant, suffix, shared):
    """All modules but one are the variant's own; other models keep theirs."""
    plain, own = (
        {x.name for x in serving(LAYOUT, 1, 8, 48, variant=variant)}
        for variant in (PLAIN, variant)
    )
    assert plain & own == {shared}
    assert own - plain == {f"{x}{suffix}" for x in plain - own}


def test_a_direction_has_a_store_of_its_own(asked):
    without, with_one = (
        [x.name for x in serving(LAYOUT, 1, 8, 48, variant=variant)]
        for variant in (OFFSET, DIRECTION)
    )
    assert without[0] == "store turbo4_128_offset"
    assert with_one == [f"{without[0]}_direction", *without[1:]]


@pytest.mark.parametrize("has_key_offset", [False, True])
def test_a_tail_has_a_module_of_its_own(asked, has_key_offset):
    """Only the store has a module of its own for a tail."""
    without, with_one = (
        [x.name for x in serving(LAYOUT, 1, 8, 48, variant=variant)]
        for variant in (Variant(has_key_offset), Variant(has_key_offset, True))
    )
    offset = "_offset" if has_key_offset else ""
    own = [name for name in with_one if name not in without]
    assert own == [f"store turbo4_128{offset}_tail"]
    assert set(without) < set(with_one)


def test_the_current_device_unless_another_is_named(asked, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    for loader in serving(LAYOUT, 4, 1, 4, device=None):
        loader.load()
    assert {device for _, device in asked} == {torch.device("cuda", 3)}


def test_each_device_has_modules_of_its_own(asked):
    """Devices may have different architectures."""
    for index in (0, 1):
        for loader in serving(LAYOUT, 4, 1, 4, device=torch.device("cuda", index)):
            loader.load()
    assert [device.index for _, device in asked] == [0] * 4 + [1] * 4
