# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The host code of the CUDA modules, compiled without kernels and run without a GPU."""

import importlib.util
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from vllm.v1.attention.ops.turbo.cuda import build as cuda_build
from vllm.v1.attention.ops.turbo.cuda.build import HEADER_NAME, LaunchRefused
from vllm.v1.attention.ops.turbo.cuda.compiler import find_nvcc, include_flags
from vllm.v1.attention.ops.turbo.cuda.constants import layout_header
from vllm.v1.attention.ops.turbo.format import TILE_TOKENS, TurboFormat
from vllm.v1.attention.ops.turbo.formats.tail import TailFormat

NVCC = find_nvcc()
pytestmark = pytest.mark.skipif(
    NVCC is None or importlib.util.find_spec("tvm_ffi") is None,
    reason="needs nvcc and apache-tvm-ffi",
)
LAYOUT = TurboFormat.from_cache_dtype("k4v3", 128)
# A function for each check of launch.cuh and tensors.cuh.
SOURCE = r"""
#include <tvm/ffi/function.h>
#include "common/launch.cuh"
#include "common/tail_entry.cuh"
#include "turbo_constants.h"
using namespace turbo;
void fail(int64_t code) { check(static_cast<cudaError_t>(code)); }
void launch_with(int64_t code) { check_launch(static_cast<cudaError_t>(code)); }
void pages(TensorView x) { check_pages("kv_cache", x, TILE_TOKENS, TILE_BYTES); }
void vectors(TensorView x) { check_vectors("key", x, HEAD_SIZE); }
void ints(TensorView x, int64_t least) { ints_of("seq_lens", x, least); }
int64_t partials(TensorView partial, TensorView lse, int64_t num_heads,
                 int64_t num_seqs, int64_t query_len) {
  return check_partials(partial, lse, num_heads, HEAD_SIZE, num_seqs, query_len);
}
void device(TensorView x) { check_device(x.device(), x); }
void offset(Optional<TensorView> x, bool is_wanted, TensorView like) {
  int num_offsets;
  key_offset_of(x, 2, HEAD_SIZE, is_wanted, like.device(), num_offsets);
}
void tail(TensorView pages, TensorView blocks, int64_t num_seqs, int64_t num_rows,
            int64_t keys, int64_t values, int64_t key_scales, int64_t value_scales) {
  // Tensors of a CPU are refused last.
  tail_pages_of(pages, blocks, num_seqs, 2, num_rows, keys, values, key_scales,
                  value_scales, pages.device());
}
// How often the number of a device was worked out, of so many calls.
int64_t worked_out(int64_t device, int64_t calls) {
  NumberByDevice known;
  int64_t count = 0;
  for (; calls > 0; --calls) known.get(device, [&] { return ++count, 7; });
  return known.get(device, [] { return 8; }) == 7 ? count : -1;
}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fail, fail);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(launch_with, launch_with);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(pages, pages);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(vectors, vectors);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(ints, ints);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(partials, partials);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(device, device);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(offset, offset);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(tail, tail);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(worked_out, worked_out);
"""
# Numbers and names of cudaError_t that refuse a launch.
REFUSALS = {
    1: "cudaErrorInvalidValue",
    9: "cudaErrorInvalidConfiguration",
    35: "cudaErrorInsufficientDriver",
    98: "cudaErrorInvalidDeviceFunction",
    200: "cudaErrorInvalidKernelImage",
    209: "cudaErrorNoKernelImageForDevice",
    218: "cudaErrorInvalidPtx",
    221: "cudaErrorJitCompilerNotFound",
    222: "cudaErrorUnsupportedPtxVersion",
    701: "cudaErrorLaunchOutOfResources",
    801: "cudaErrorNotSupported",
}
FAULTS = {
    2: "cudaErrorMemoryAllocation",
    214: "cudaErrorECCUncorrectable",
    700: "cudaErrorIllegalAddress",
    702: "cudaErrorLaunchTimeout",
    715: "cudaErrorIllegalInstruction",
    716: "cudaErrorMisalignedAddress",
    717: "cudaErrorInvalidAddressSpace",
    718: "cudaErrorInvalidPc",
    719: "cudaErrorLaunchFailure",
    710: "cudaErrorAssert",
    999: "cudaErrorUnknown",
}


@pytest.fixture(scope="module")
def host(tmp_path_factory) -> Callable[[str], Callable]:
    """A function that loads a function of ``SOURCE`` by its name."""
    from tvm_ffi import libinfo

    folder = tmp_path_factory.mktemp("host")
    (folder / HEADER_NAME).write_text(layout_header(LAYOUT))
    (folder / "host.cu").write_text(SOURCE)
    library = folder / "host.so"
    assert NVCC is not None
    command: list[str | Path] = [NVCC, "-std=c++17", "-shared", "-O0"]
    command += ["-Xcompiler=-fPIC"]
    command += [*include_flags(), f"-I{folder}", f"-o={library}", folder / "host.cu"]
    command += [libinfo.find_libtvm_ffi()]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return lambda name: cuda_build._load_function(library, name)


@pytest.mark.parametrize("code", REFUSALS, ids=REFUSALS.values())
def test_a_refused_launch_has_a_class_of_its_own(host, code):
    with pytest.raises(LaunchRefused, match=f"^{REFUSALS[code]}: "):
        host("launch_with")(code)


@pytest.mark.parametrize("code", FAULTS, ids=FAULTS.values())
def test_a_fault_of_a_kernel_that_ran_is_no_refusal(host, code):
    with pytest.raises(RuntimeError, match=f"^{FAULTS[code]}: ") as error:
        host("launch_with")(code)
    assert not isinstance(error.value, LaunchRefused)


def test_success_raises_nothing(host):
    host("launch_with")(0)
    host("fail")(0)


def test_an_error_without_a_launch_is_no_refusal(host):
    with pytest.raises(RuntimeError, match="^cudaErrorInvalidValue: ") as error:
        host("fail")(1)
    assert not isinstance(error.value, LaunchRefused)


@pytest.mark.parametrize("device", [0, 1, 63])
def test_a_device_is_asked_once(host, device):
    assert host("worked_out")(device, 5) == 1


@pytest.mark.parametrize("device", [-1, 64])
def test_devices_without_a_place(host, device):
    with pytest.raises(Exception, match=str(device)):
        host("worked_out")(device, 1)


def pages(
    num_blocks: int = 3, heads: int = 2, block_size: int = 32, pad: int = 0
) -> torch.Tensor:
    """A cache with ``pad`` bytes after each (block, head)."""
    head_bytes = block_size * LAYOUT.slot_size
    buffer = torch.zeros(num_blocks, heads, head_bytes + pad, dtype=torch.uint8)
    shape = (num_blocks, heads, block_size, LAYOUT.slot_size)
    return buffer[..., :head_bytes].view(shape)


def at(x: torch.Tensor, offset: int) -> torch.Tensor:
    """Zeros of the same shape, ``offset`` elements past an aligned address."""
    buffer = torch.zeros(x.numel() + offset + 64, dtype=x.dtype)
    first = -buffer.data_ptr() % 128 // x.element_size() + offset
    return buffer[first : first + x.numel()].view(x.shape)


PAGES = {
    "plain": pages(),
    "padded heads": pages(pad=16),
    "heads after blocks": pages(2, 3).transpose(0, 1),
    "one block and head, whose strides say nothing": pages(1, 1, pad=3),
    "blocks of 528": pages(block_size=528),
}
BAD_PAGES = {
    "axis": (pages()[0], "3 axes"),
    "dtype": (pages().view(torch.int8), "dtype int8, not uint8"),
    "slot": (pages()[..., :-1], f"axis 3, not {LAYOUT.slot_size}"),
    "bytes": (pages()[..., ::2], "axis 3"),
    "block size": (pages()[:, :, :17], "blocks of 17 tokens"),
    "no tokens": (pages()[:, :, :0], "blocks of 0 tokens"),
    "tokens": (pages()[:, :, ::2], "bytes apart"),
    "stride": (pages(pad=8), "stride of axis [01], .* no multiple of 16"),
    "address": (at(pages(), 8), "address is no multiple of 16"),
    "slots": (
        pages(1, 1, 16).expand(2**27, 1, 16, LAYOUT.slot_size),
        "2147483648 is not between",
    ),
}


@pytest.mark.parametrize("name", PAGES)
def test_pages_that_are_taken(host, name):
    assert TILE_TOKENS == 16
    host("pages")(PAGES[name])


@pytest.mark.parametrize("name", BAD_PAGES)
def test_pages_that_are_not_taken(host, name):
    x, message = BAD_PAGES[name]
    error = TypeError if name == "dtype" else ValueError
    with pytest.raises(error, match=f"kv_cache: .*{message}"):
        host("pages")(x)


def qkv(dtype: torch.dtype = torch.bfloat16, size: int = 128) -> torch.Tensor:
    return torch.zeros(5, 4, size, dtype=dtype)


@pytest.mark.parametrize(
    "x",
    [
        qkv(),
        qkv(torch.float32),
        qkv()[:, 2:],
        qkv().transpose(0, 1),
        qkv()[:1, :1],
        qkv()[:0],
        at(qkv(), 4),
        torch.zeros(1, 1, 131)[..., :128],
    ],
    ids=["plain", "fp32", "view", "heads first", "one", "none", "moved", "strides"],
)
def test_vectors_that_are_taken(host, x):
    host("vectors")(x)


@pytest.mark.parametrize(
    "x, message",
    [
        (qkv()[0], "2 axes"),
        (qkv(size=64), "64 along axis 2, not 128"),
        (qkv(size=256)[..., ::2], "last axis is not contiguous, but of stride 2"),
        (qkv(size=130)[..., :128], "stride of axis 0, 520, is no|stride of axis 1"),
        (at(qkv(), 2), "address is no multiple of 8 bytes"),
        (at(qkv(torch.float32), 2), "address is no multiple of 16 bytes"),
    ],
    ids=["axes", "size", "last axis", "stride", "address", "fp32 address"],
)
def test_vectors_that_are_not_taken(host, x, message):
    with pytest.raises(ValueError, match=f"key: .*({message})"):
        host("vectors")(x)


def test_lengths(host):
    lengths = torch.zeros(4, dtype=torch.int32)
    host("ints")(lengths, 4)
    host("ints")(lengths[:3], 3)
    for x, error in (
        (lengths[:3], ValueError),
        (lengths.long(), TypeError),
        (lengths[None], ValueError),
        (torch.zeros(8, dtype=torch.int32)[::2], ValueError),
    ):
        with pytest.raises(error, match="seq_lens: "):
            host("ints")(x, 4)


def test_partial_results(host):
    partial, lse = torch.zeros(24, 8, 128), torch.zeros(24, 8)
    check = host("partials")
    assert check(partial, lse, 8, 3, 2) == 4
    assert check(partial, lse, 8, 5, 2) == 2  # and room that is left
    huge = torch.zeros(1, 1, 128).expand(2**18, 64, 128)
    for name, arguments in {
        "partial: .*not one a query": (partial, lse, 8, 25, 1),
        "partial: 8 along axis 1": (partial, lse, 4, 3, 2),
        "partial: dtype float16": (partial.half(), lse, 8, 3, 2),
        "partial: not contiguous": (partial[..., :64], lse, 8, 3, 2),
        "partial: its address": (at(partial, 2), lse, 8, 3, 2),
        "partial: not contig": (huge, lse, 64, 1, 1),
        "partial_lse: 23 along": (partial, lse[:23], 8, 3, 2),
        "partial_lse: dtype float64": (partial, lse.double(), 8, 3, 2),
    }.items():
        with pytest.raises((TypeError, ValueError), match=name):
            check(*arguments)


def test_tensors_of_a_cpu_are_not_taken(host):
    with pytest.raises(ValueError, match="NVIDIA GPU"):
        host("device")(torch.zeros(1))


@pytest.mark.parametrize("is_wanted", [False, True])
def test_an_offset_is_for_modules_that_were_compiled_for_it(host, is_wanted):
    table = torch.zeros(3, 2, LAYOUT.head_size)
    host("offset")(None, False, table)
    words = "" if is_wanted else "not "
    with pytest.raises(ValueError, match=f"module is {words}compiled for it"):
        host("offset")(None if is_wanted else table, is_wanted, table)


TAIL = TailFormat(LAYOUT, 32)
BAD_TAILS = {
    "axes": (dict(pages=pages()[0]), "tail_pages: 3 axes"),
    "heads": (dict(pages=pages(heads=3)), "tail_pages: 3 along axis 1, not 2"),
    "stride": (dict(pages=pages(pad=8)), "tail_pages: the stride of axis"),
    "no rows": (dict(num_rows=0), "tail_pages: 0 rows, not 1 to 64"),
    "rows": (dict(num_rows=65), "tail_pages: 65 rows, not 1 to 64"),
    "more rows": (
        dict(num_rows=TAIL.num_rows + 1),
        "tail value_scales: .* rows of",
    ),
    "start": (dict(keys=8), "tail keys: .* rows of 128 bytes from 8 on"),
    "before": (dict(values=-16), "tail values: .* from -16 on"),
    "past": (dict(key_scales=TAIL.page_bytes), "tail key_scales: .* in pages of"),
    "blocks": (dict(num_seqs=4), "tail_blocks: of 3, not 4"),
    "a CPU's": ({}, "NVIDIA GPU"),
}


@pytest.mark.parametrize("name", BAD_TAILS)
def test_tails_that_are_not_taken(host, name):
    """Tails with wrong shapes, strides, starts or numbers of rows are refused.

    With more rows than fit, the plane that is checked last still ends in the page.
    """
    changed, message = BAD_TAILS[name]
    starts = dict(
        zip(("keys", "values", "key_scales", "value_scales"), TAIL.plane_offsets)
    )
    if name == "more rows":
        starts["value_scales"] = TAIL.page_bytes - 16
    arguments = {
        "pages": pages(),
        "blocks": torch.zeros(3, dtype=torch.int32),
        "num_seqs": 3,
        "num_rows": TAIL.num_rows,
        **starts,
        **changed,
    }
    with pytest.raises(ValueError, match=message):
        host("tail")(*arguments.values())
