# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The sources of the CUDA kernels, which are compiled on the machine that runs them."""

import ast
from fnmatch import fnmatch
from pathlib import Path

import pytest
import regex as re

import vllm
from vllm.v1.attention.ops.turbo.cuda.build import SOURCE_DIR
from vllm.v1.attention.ops.turbo.cuda.built import PREBUILT_DIR, digest_path


def test_wheels_have_the_cuda_sources():
    """``setup.py`` of a checkout or sdist lists the files of a wheel: sources, and
    libraries that were built before.
    """
    package = Path(vllm.__file__).parent
    setup = package.with_name("setup.py")
    if not setup.is_file():
        pytest.skip("vLLM is installed from a wheel")
    (value,) = (
        node.value
        for node in ast.parse(setup.read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets) == "package_data"
    )
    patterns = ast.literal_eval(value)["vllm"]
    sources = {
        path.relative_to(package).as_posix()
        for path in (package / "v1/attention/ops/turbo/cuda/csrc").rglob("*.*")
    }
    library = PREBUILT_DIR.relative_to(package) / "store.so"
    sources |= {library.as_posix(), digest_path(library).as_posix()}
    packaged = {name for name in sources for p in patterns if fnmatch(name, p)}
    assert sources and packaged == sources


def test_cuda_sources_are_all_here():
    """Each file that a source includes exists, except the generated header."""
    paths = list(SOURCE_DIR.rglob("*.*"))
    found = {path.relative_to(SOURCE_DIR).as_posix() for path in paths}
    for path in paths:
        included = re.findall(r'^#include "(.*)"', path.read_text(), re.MULTILINE)
        assert {n for n in included if not n.endswith("constants.h")} <= found
    assert "store/store.cu" in found
