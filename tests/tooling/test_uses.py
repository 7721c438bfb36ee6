# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Names of vLLM that an overlay uses and that another release lacks."""

import pytest
from turbo_series.release import Release
from turbo_series.uses import Comparison

INTERFACE = "vllm/v1/interface.py"
BASE = "vllm/v1/base.py"
RUNNER = "vllm/v1/runner.py"
VLLM = {
    "vllm/__init__.py": "",
    "vllm/envs.py": (
        "NAMES = {'VLLM_CACHE': lambda: 'cache', 'VLLM_DEBUG': lambda: 0}\n"
        "def __getattr__(name):\n    return NAMES[name]()\n"
    ),
    "vllm/v1/__init__.py": "from .base import *\n",
    INTERFACE: (
        "from dataclasses import dataclass\n"
        "@dataclass\n"
        "class Spec:\n"
        "    block_size: int\n"
        "    topk_buffer_width: int | None = None\n"
        "    page_size: int = 0\n"
        "class MLASpec(Spec):\n"
        "    latent: bool = False\n"
    ),
    BASE: (
        "from vllm.v1.interface import Spec\n"
        "class Base:\n"
        "    supports_sinks = False\n"
        "    def __init__(self, spec: Spec) -> None:\n"
        "        self.spec = spec\n"
        "        self.scale = 1.0\n"
        "    def forward(self, query, key):\n"
        "        raise NotImplementedError\n"
        "    def reserve_workspace(self):\n"
        "        pass\n"
        "class Impl(Base):\n"
        "    def reserve_workspace(self):\n"
        "        super().reserve_workspace()\n"
        "def pad(tensor, size, value=0):\n"
        "    return tensor\n"
    ),
    RUNNER: (
        "import torch\n"
        "def run(layer, spec):\n"
        "    layer.impl.reserve_workspace()\n"
        "    layer.impl.supports_sinks\n"
        "    layer.plan(spec, torch.ones(1).clamp(0))\n"
        "    return layer.impl.forward(spec.page_size, layer.impl.scale)\n"
        "class Layer:\n"
        "    def plan(self, spec, mask):\n"
        "        pass\n"
        "    def clamp(self):\n"
        "        pass\n"
        "    def zeros(self):\n"
        "        pass\n"
    ),
}
OVERLAY = {
    "vllm/turbo.py": (
        "import torch\n"
        "from vllm import envs\n"
        "from vllm.v1 import Impl, pad\n"
        "from vllm.v1.interface import MLASpec\n"
        "FOLDER = envs.VLLM_CACHE\n"
        "REASONS = {'sparse': lambda spec: spec.topk_buffer_width is not None}\n"
        "class TurboImpl(Impl):\n"
        "    supports_sinks = True\n"
        "    def __init__(self, spec):\n"
        "        super().__init__(spec)\n"
        "        self.bits = 4\n"
        "        self.scale = 2.0\n"
        "    def forward(self, query, key):\n"
        "        return pad(query.clamp(0), self.bits, value=1)\n"
        "    def reserve_workspace(self):\n"
        "        self.workspace = self.spec\n"
        "def sizes(spec: MLASpec, layer):\n"
        "    layer.plan(spec, torch.zeros(1))\n"
        "    return MLASpec(16, page_size=spec.page_size)\n"
    ),
    "tests/test_turbo.py": (
        "from functools import partial\n"
        "from vllm.v1.interface import MLASpec\n"
        "make = partial(MLASpec, topk_buffer_width=64)\n"
    ),
}
# A change of the release, as (path, old, new), and all findings that it leads to.
Case = tuple[list[tuple[str, str, str]], list[str]]
FIELD = (INTERFACE, "    topk_buffer_width: int | None = None\n", "")
METHODS = (
    "    def reserve_workspace(self):\n        pass\n"
    "class Impl(Base):\n"
    "    def reserve_workspace(self):\n        super().reserve_workspace()\n"
)
HOOK = (BASE, METHODS, "class Impl(Base):\n    pass\n")
CALL = (RUNNER, "    layer.impl.reserve_workspace()\n", "")
CASES: dict[str, Case] = {
    "no change": ([], []),
    "other lines": ([(BASE, "class Base", "import os\nclass Base")], []),
    "field": (
        [FIELD],
        [
            "vllm/turbo.py:6 reads topk_buffer_width, which nothing defines",
            "tests/test_turbo.py:3 passes topk_buffer_width, which nothing defines",
        ],
    ),
    "hook and its call": (
        [HOOK, CALL],
        [
            "vllm/turbo.py:15 overrides Impl.reserve_workspace, which is gone, and "
            "nothing reads it"
        ],
    ),
    "hook": (
        [HOOK],
        ["vllm/turbo.py:15 overrides Impl.reserve_workspace, which is gone"],
    ),
    "call of a hook": (
        [CALL],
        [
            "vllm/turbo.py:15 overrides Impl.reserve_workspace, which nothing reads "
            "any more"
        ],
    ),
    "attribute of a class": (
        [(BASE, "    supports_sinks = False\n", "")],
        ["vllm/turbo.py:8 overrides Base.supports_sinks, which is gone"],
    ),
    "attribute of an instance": (
        [(BASE, "        self.spec = spec\n", "")],
        ["vllm/turbo.py:16 reads vllm.turbo.TurboImpl.spec, which is gone"],
    ),
    "read of an attribute of an instance": (
        [(RUNNER, ", layer.impl.scale)", ", 1)")],
        ["vllm/turbo.py:12 overrides Base.scale, which nothing reads any more"],
    ),
    "function": (
        [(BASE, "def pad(", "def pad_tensor(")],
        ["vllm/turbo.py:3 imports vllm.v1.pad, which is gone"],
    ),
    "module": (
        [(INTERFACE, "", "")],
        [
            "vllm/turbo.py:4 and 1 more imports vllm.v1.interface.MLASpec, which is "
            "gone",
            "vllm/turbo.py:6 reads topk_buffer_width, which nothing defines",
            "vllm/turbo.py:19 reads vllm.v1.interface.MLASpec.page_size, which is gone",
            "tests/test_turbo.py:3 passes topk_buffer_width, which nothing defines",
        ],
    ),
    "name behind __getattr__": (
        [("vllm/envs.py", "VLLM_CACHE", "VLLM_FOLDER")],
        ["vllm/turbo.py:5 reads vllm.envs.VLLM_CACHE, which is gone"],
    ),
    "parameters of a hook": (
        [(BASE, "query, key", "query, key, mask=None")],
        ["vllm/turbo.py:13 overrides Base.forward, whose parameters change: +mask="],
    ),
    "parameters of a constructor": (
        [(BASE, "spec: Spec)", "spec: Spec, name: str)")],
        ["vllm/turbo.py:9 overrides Base.__init__, whose parameters change: +name"],
    ),
    "parameters of a function": (
        [(BASE, "size, value=0", "size, *, value")],
        [
            "vllm/turbo.py:14 calls vllm.v1.pad, whose parameters change: -value=, "
            "+*, +value"
        ],
    ),
    "parameters of a method of an unknown object": (
        [(RUNNER, "self, spec, mask", "self, mask, spec")],
        ["vllm/turbo.py:18 calls plan, whose parameters change: their order"],
    ),
    "one more field": (
        [(INTERFACE, "    latent: bool", "    more: int = 1\n    latent: bool")],
        [],
    ),
    "one more field to give": (
        [(INTERFACE, "    block_size: int\n", "    block_size: int\n    more: int\n")],
        [
            "vllm/turbo.py:19 calls vllm.v1.interface.MLASpec, whose parameters "
            "change: +more"
        ],
    ),
    "another first field": (
        [
            (
                INTERFACE,
                "    block_size: int\n",
                "    more: int = 1\n    block_size: int\n",
            )
        ],
        [
            "vllm/turbo.py:19 calls vllm.v1.interface.MLASpec, whose parameters "
            "change: +more="
        ],
    ),
    "attribute of another package": (
        [(RUNNER, "    def zeros(self):\n        pass\n", "")],
        [],
    ),
    # A tensor has one as well.
    "attribute that others define": (
        [(RUNNER, "    def clamp(self):\n        pass\n", "")],
        [],
    ),
}


def _findings(changes: list[tuple[str, str, str]]) -> list[str]:
    """The findings in a release with some changes."""
    changed = dict(VLLM)
    for path, old, new in changes:
        assert not old or changed[path].count(old) == 1
        if old:
            changed[path] = changed[path].replace(old, new)
        else:
            del changed[path]
    old, new = Release(VLLM | OVERLAY), Release(changed | OVERLAY)
    return [str(each) for each in Comparison(old, new, set(OVERLAY)).findings()]


@pytest.mark.parametrize("name", CASES)
def test_changes_of_a_release(name: str) -> None:
    """Each change has its findings and no others."""
    changes, wanted = CASES[name]
    assert _findings(changes) == wanted


def test_unreadable_source() -> None:
    findings = _findings([(BASE, "class Base:", "class Base!:")])
    assert f"{BASE} cannot be read by this Python" in findings
