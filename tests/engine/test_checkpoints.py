# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Checkpoints as people have them: with quantised weights, scales for a cache, or both.

Each kind is asked for facts in texts, with a turbo dtype and with the model's own.
"""

import sys
from pathlib import Path
from typing import Any

import pytest
import trained
from harness import SCRIPTS, Call, Engine, Jobs
from scenarios import PROMPTS
from trained import MAX_TOKENS, TRAINED

sys.path.insert(0, str(SCRIPTS))

from checkpoint_kinds import KINDS, write_checkpoint  # noqa: E402

DTYPE = "turbo4"
# Else a checkpoint's scheme decides.
OWN = "float16"
# In nats a token. NVFP4 rounds activations to 4 bits: what differs at all is rounded to
# different codes, and the two are further apart.
KL_BOUND = {"modelopt-nvfp4": 0.1, "modelopt-nvfp4-cache": 0.1}
# Weights that are unpacked by a stand-in, and scales that a tool writes elsewhere.
ALWAYS = ("awq", "modelopt-fp8")
WITH_SCALES_ALONE = ("cache", "cache-per-head")
ASKED = [
    pytest.param(name, marks=() if name in ALWAYS else pytest.mark.matrix)
    for name, kind in KINDS.items()
    if kind.on_cpu
]


@pytest.fixture(scope="module")
def asked(
    request: pytest.FixtureRequest,
    jobs: Jobs,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    """What the kinds that are tested have answered."""
    kinds: dict[str, None] = {}
    for item in request.session.items:
        callspec = getattr(item, "callspec", None)
        if item.path == request.path and callspec and "kind" in callspec.params:
            kinds[callspec.params["kind"]] = None
    root = tmp_path_factory.mktemp("kinds")
    engines = {}
    for kind in kinds:
        folder = write_checkpoint(TRAINED, root / kind, KINDS[kind])
        for dtype in (OWN, DTYPE):
            calls = {"batched": Call(trained.prompts(), MAX_TOKENS)}
            engines[f"{kind}-{dtype}"] = Engine(
                {"kv_cache_dtype": dtype}, calls, model=folder
            )
    return jobs.start("kinds", "v1", engines).result()


@pytest.mark.parametrize("kind", ASKED)
def test_kind_answers_as_with_its_own_dtype(asked: dict[str, Any], kind: str):
    own, packed = (
        asked[f"{kind}-{dtype}"]["calls"]["batched"]["requests"]
        for dtype in (OWN, DTYPE)
    )
    assert all(trained.right(own)) and all(trained.right(packed))
    assert 0 < trained.divergence(own, packed) < KL_BOUND.get(kind, 0.01)


@pytest.fixture(scope="module")
def outcome(
    model: Path, jobs: Jobs, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("checkpoints")

    def engine(folder: str | None) -> Engine:
        args = {"kv_cache_dtype": DTYPE}
        return Engine(args, {"batched": Call(PROMPTS, 8)}, model=folder)

    engines = {"none": engine(None)} | {
        name: engine(write_checkpoint(model, root / name, KINDS[name]))
        for name in WITH_SCALES_ALONE
    }
    return jobs.start("checkpoints", "v1", engines).result()


@pytest.mark.parametrize("name", WITH_SCALES_ALONE)
def test_scales_are_not_read(outcome: dict[str, Any], name: str):
    assert outcome[name] == outcome["none"]
