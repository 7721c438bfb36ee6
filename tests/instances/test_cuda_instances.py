# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A compiler reads every module of CUDA kernels that serving may ask for, on any GPU.

It checks syntax, templates and static assertions. The emulated GPU's headers stand for
CUDA's, so that neither nvcc nor a GPU is needed. ``ci/gpu.py architectures`` compiles
the same modules with nvcc.
"""

from functools import cache
from pathlib import Path

import pytest

from vllm.v1.attention.ops.turbo.cuda.build import HEADER_NAME, SOURCE_DIR, CudaModule
from vllm.v1.attention.ops.turbo.cuda.family import ARCHITECTURES
from vllm.v1.attention.ops.turbo.cuda.prebuild import HEAD_SIZES, served_modules
from vllm.v1.attention.ops.turbo.format import TURBO_PRESETS

pytest.importorskip("vllm_turbo_cpu_standins", reason="needs the emulated GPU")
from vllm_turbo_cpu_standins.cuda.build import (  # noqa: E402
    CannotBuildError,
    check,
    compiler,
)

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs g++, or CXX")

# Tests that share the modules of an architecture, all of which take a minute.
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
def modules(capability: int) -> list[tuple[str, CudaModule]]:
    return list(served_modules(capability, [*TURBO_PRESETS], HEAD_SIZES).items())


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("capability", ARCHITECTURES)
def test_all_modules(capability, part):
    wrong = {}
    chosen = modules(capability)[part::PARTS]
    assert len(chosen) > 50
    for name, module in chosen:
        try:
            check(module.source, SOURCE_DIR, {HEADER_NAME: module.header}, module.flags)
        except CannotBuildError as error:
            wrong[name] = str(error)[:2000]
    assert not wrong, "\n".join(f"{name}: {text}" for name, text in wrong.items())


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
