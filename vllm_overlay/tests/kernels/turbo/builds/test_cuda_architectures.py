# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The CUDA kernels compile for each architecture, with no more spills than recorded.

A few modules are compiled here; ``compile_kernels.py`` compiles all.
"""

import importlib.util
import json

import pytest
import regex as re

from vllm.v1.attention.ops.turbo.cuda import prebuild
from vllm.v1.attention.ops.turbo.cuda.compiler import (
    CompileError,
    find_nvcc,
    nvcc_release,
)
from vllm.v1.attention.ops.turbo.cuda.family import ARCHITECTURES
from vllm.v1.attention.ops.turbo.cuda.modules import all_modules

from .compile_kernels import (
    RECORDED,
    Resources,
    compile_to_ptx,
    excess,
    parse_resources,
)

NVCC = find_nvcc()
requires_nvcc = pytest.mark.skipif(
    NVCC is None or importlib.util.find_spec("tvm_ffi") is None,
    reason="needs nvcc and apache-tvm-ffi",
)
# Some modules for the oldest, the newest and the smallest shared memory.
SUBSET = [
    ("decode turbo4_128_4", 80),
    ("decode turbo3_64_16", 120),
    ("decode_wgmma turbo4_128_c32", 90),
    ("extend_wgmma turbo4_128_r128", 90),
    ("extend_wgmma turbo4_256_r128", 90),
    ("extend_outputs turbo4_128_r128", 90),
    ("extend_mma turbo3_256_r64", 120),
    ("extend_mma turbo4_128_r128_offset", 86),
    ("store turbo4_128", 80),
    ("store turbo4_64_offset", 90),
    ("merge 128", 90),
]
# The first capability on which a kernel may begin before the previous one has ended.
OVERLAPPING = 90
WAIT = "griddepcontrol.wait;"
LET_NEXT_BEGIN = "griddepcontrol.launch_dependents;"
ROTATE = "mma.sync"


def recorded() -> dict:
    return json.loads(RECORDED.read_text())


def check_overlap(kernel: str, capability: int, ptx: str) -> None:
    """Check that kernels wait for the previous kernel before they write or read.

    Only the merge and the kernel that joins parts of outputs read before: inputs from
    the model. So the store lets the next kernel begin only after its own wait and its
    rotation.
    """
    if capability < OVERLAPPING:
        assert "griddepcontrol" not in ptx
        return
    entries = re.split(r"^\.visible \.entry ", ptx, flags=re.MULTILINE)[1:]
    assert entries
    for entry in entries:
        early = r"\b(st\.global|red\.|atom\."
        reads_early = kernel == "merge" or "join_kernel" in entry.partition("(")[0]
        early += ")" if reads_early else r"|ld\.global|cp\.async)"
        before, wait, _ = entry.partition(WAIT)
        assert wait and not re.search(early, before)
        if kernel in ("store", "merge"):
            assert LET_NEXT_BEGIN in entry and LET_NEXT_BEGIN not in before
        if kernel == "store":
            assert ROTATE in entry.partition(LET_NEXT_BEGIN)[0]


@requires_nvcc
@pytest.mark.parametrize(
    "name, capability", SUBSET, ids=[f"{name}-sm_{number}" for name, number in SUBSET]
)
def test_compiles_and_spills_no_more_than_is_recorded(name, capability):
    module = all_modules(capability)[name]
    found, ptx = compile_to_ptx(module, capability, NVCC)
    check_overlap(module.kernel, capability, ptx)
    assert 0 < found.registers <= 255
    if nvcc_release(NVCC) != recorded()["nvcc"]:
        pytest.skip("it compiles; spills are recorded for another release of nvcc")
    assert excess(name, capability, found, recorded()) is None


@requires_nvcc
def test_a_module_that_cannot_be_compiled_is_an_error():
    module = all_modules(90)["merge 128"]
    broken = module._replace(header=module.header.replace("#define HEAD_SIZE", "//"))
    with pytest.raises(CompileError, match="HEAD_SIZE"):
        compile_to_ptx(broken, 90, NVCC)


@pytest.mark.parametrize("capability", ARCHITECTURES)
def test_every_instance_is_recorded(capability, monkeypatch):
    """The recorded registers leave room for all warps of a block."""
    # The name has a hash of all sources, which takes time.
    monkeypatch.setattr(prebuild, "module_name", lambda *_: "")
    modules = {
        f"{job.module.kernel} {job.module.instance}": job.module
        for job in prebuild.jobs_for([capability])
    }
    rows = recorded()["modules"].items()
    table = {name: row for name, row in rows if str(capability) in row}
    assert modules and table.keys() == modules.keys()
    for name, module in modules.items():
        registers, spills = table[name][str(capability)]
        assert 0 < registers <= 255 and spills >= 0
        flags = dict(flag[2:].split("=") for flag in module.flags if "-D" in flag)
        warps = int(flags.get("DECODE_WARPS", 0))
        for role in ("CONSUMERS", "PRODUCERS"):
            warps += int(flags.get(f"EXTEND_{role}", 0))
        blocks = int(flags.get("EXTEND_BLOCKS", 1))
        assert registers * 32 * warps * blocks <= 65536


def test_the_output_of_ptxas_is_read():
    text = """
ptxas info    : Function properties for one
    16 bytes stack frame, 20 bytes spill stores, 24 bytes spill loads
ptxas info    : Used 96 registers, used 1 barriers
ptxas info    : Function properties for other
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers
"""
    assert parse_resources(text) == Resources(168, 44)
    with pytest.raises(CompileError, match="not understood"):
        parse_resources("ptxas info    : 0 bytes gmem")
    serialized = "wgmma.mma_async instructions are serialized due to ...\n"
    with pytest.raises(CompileError, match="do not overlap"):
        parse_resources(serialized + text)


def test_more_spills_than_recorded_are_a_failure():
    table = {"nvcc": "13.0", "modules": {"store": {"90": [96, 8]}}}
    assert excess("store", 90, Resources(255, 8), table) is None
    message = excess("store", 90, Resources(9, 12), table)
    assert message is not None and "12 bytes of spills, not 8" in message
    # A module without a record may not spill.
    assert excess("store", 80, Resources(96, 1), table) is not None
