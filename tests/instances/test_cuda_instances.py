# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A compiler reads modules of CUDA kernels that serving may ask for, on any GPU.

It checks syntax, templates and static assertions. The emulated GPU's headers stand for
CUDA's, so that neither nvcc nor a GPU is needed. Each two parts of modules' names that
occur together do so here, for some architecture, and each part does for each one that
has it. ``ci/gpu.py architectures`` compiles all modules with nvcc.
"""

import sys
from functools import cache
from pathlib import Path

import pytest

from vllm.v1.attention.ops.turbo.cuda.build import HEADER_NAME, SOURCE_DIR, CudaModule
from vllm.v1.attention.ops.turbo.cuda.family import ARCHITECTURES
from vllm.v1.attention.ops.turbo.cuda.prebuild import HEAD_SIZES, served_modules
from vllm.v1.attention.ops.turbo.format import TURBO_PRESETS

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "ci"))

from covering import covering  # noqa: E402

pytest.importorskip("vllm_turbo_cpu_standins", reason="needs the emulated GPU")
from vllm_turbo_cpu_standins.cuda.build import (  # noqa: E402
    CannotBuildError,
    check,
    compiler,
)

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs g++, or CXX")

# Tests that share the modules of an architecture.
PARTS = 4

WRONG = """
#include <cuda_runtime.h>

#include "sizes.h"

namespace turbo {
template <int kSize>
struct Vector {
  static_assert(kSize % 8 == 0, "a vector has whole words");
  float x[kSize];
};

template <int kSize>
__device__ void fill(float* out) {
  Vector<kSize> vector = {};
  out[0] = vector.x[0];
}
}  // namespace turbo

void run(float* out) { turbo::fill<SIZE>(out); }
"""


@cache
def served(capability: int) -> dict[str, CudaModule]:
    return served_modules(capability, [*TURBO_PRESETS], HEAD_SIZES)


@cache
def chosen() -> list[tuple[int, str, CudaModule]]:
    """Modules with their architectures and names."""
    every = [(x, *item) for x in ARCHITECTURES for item in served(x).items()]
    parts: dict[str, set[str]] = {}
    for _, _, module in every:
        parts.setdefault(module.kernel, set()).update(parts_of(module))

    def named(item: tuple[int, str, CudaModule]) -> list[tuple[str, str, bool]]:
        capability, _, module = item
        own = parts_of(module)
        values = [(module.kernel, x, x in own) for x in parts[module.kernel]]
        return [*values, (module.kernel, f"sm_{capability}", True)]

    return covering(every, named, together=2)


def modules(capability: int) -> list[tuple[str, CudaModule]]:
    return [(name, module) for x, name, module in chosen() if x == capability]


def parts_of(module: CudaModule) -> set[str]:
    return set(module.instance.split("_"))


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("capability", ARCHITECTURES)
def test_all_modules(capability, part):
    wrong = {}
    for name, module in modules(capability)[part::PARTS]:
        try:
            check(module.source, SOURCE_DIR, {HEADER_NAME: module.header}, module.flags)
        except CannotBuildError as error:
            wrong[name] = str(error)[:2000]
    assert not wrong, "\n".join(f"{name}: {text}" for name, text in wrong.items())


@pytest.mark.parametrize("capability", ARCHITECTURES)
def test_each_kernel_and_part_of_a_name_is_read(capability):
    """Every dtype, size and feature that serving may ask a kernel for is compiled."""
    every = served(capability).values()
    wanted = {(x.kernel, part) for x in every for part in parts_of(x)}
    found = {(x.kernel, part) for _, x in modules(capability) for part in parts_of(x)}
    assert found == wanted and len(every) > 200


@pytest.mark.parametrize("size, is_right", [(16, True), (12, False)])
def test_static_assertions_of_templates_are_seen(tmp_path: Path, size, is_right):
    source = tmp_path / "wrong.cu"
    source.write_text(WRONG)
    headers = {"sizes.h": f"#define SIZE {size}\n"}
    if is_right:
        check(source, tmp_path, headers)
        return
    for _ in range(2):  # a wrong module is not cached as read
        with pytest.raises(CannotBuildError, match="a vector has whole words"):
            check(source, tmp_path, headers)
