# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Every refusal names the case, the supported values and the flag that helps."""

import ast
import inspect
import textwrap
from dataclasses import fields

import pytest
import regex as re
import torch

import vllm.envs as envs
from vllm.config import AttentionConfig, CompilationConfig, SpeculativeConfig
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionBackend, AttentionType
from vllm.v1.attention.backends.mla.turbo_mla import TurboMLABackend
from vllm.v1.attention.backends.turbo_attn import TurboAttentionBackend
from vllm.v1.attention.ops.turbo import reasons
from vllm.v1.attention.ops.turbo.reasons import MLA_REASONS, REASONS, Reason
from vllm.v1.attention.ops.turbo.refusals import (
    ATTENTION_KINDS,
    BORROWED,
    TAIL_FEATURES,
    refusal,
    tail_room,
)
from vllm.v1.attention.ops.turbo.serving.connectors import (
    CANONICAL_MLA,
    CONNECTORS,
    UNKNOWN_WITH_MLA,
    UNKNOWN_WITH_SPARSE_MLA,
    State,
)

from .refusal_cases import serve_options

ALL = {str(reason): reason for reason in (*REASONS, *MLA_REASONS)}
all_reasons = pytest.mark.parametrize("reason", ALL.values(), ids=ALL)
WAY_OUT = " Use --kv-cache-dtype fp8 or auto instead."
SETTING = r"--[a-z][\w.-]*\w|VLLM_\w+"
# Reasons whose other values are unknown here, such as a model's argument.
WITHOUT_VALUES = {reasons.LAYER_ARGUMENT}
# Words for a backend that is not asked, because the kind of attention selects it.
OTHER_KIND = {"MLA not supported", "non-MLA not supported"}
# Configurations whose fields messages name after a flag.
CONFIGS = {
    "--attention-config": AttentionConfig(),
    "--compilation-config": CompilationConfig(),
}


def test_every_reason_is_listed():
    defined = {each for each in vars(reasons).values() if isinstance(each, Reason)}
    assert defined == set(ALL.values())


@all_reasons
def test_message(reason: Reason):
    """A message has all parts of a reason, and another dtype if no flag helps all."""
    message = refusal("turbo4", [reason])
    for part in (reason.met, reason.supported, reason.instead):
        assert part in message
    assert message.endswith(WAY_OUT) == (not reason.instead or reason.is_partial)
    is_helped = re.search(SETTING, str(reason)) or message.endswith(WAY_OUT)
    assert is_helped or reason is reasons.CONNECTOR
    if "<" in reason.met and reason not in WITHOUT_VALUES:
        assert reason.supported or reason.instead


def test_the_dtype_is_named_once_where_one_reason_needs_it():
    some, none = reasons.BLOCK_SIZE.of(block_size=8), reasons.ALIBI
    assert refusal("k4v3", [some]) == (
        "--kv-cache-dtype k4v3 does not support this: block_size 8 (supported: "
        "multiples of 16; leave out --block-size, or pass one of these)."
    )
    for found in ([some, none], [none, some], [none, none]):
        assert refusal("turbo4", found).count(WAY_OUT) == 1


def check_settings(text: str) -> None:
    """Check that the settings in a message exist."""
    for setting in re.findall(SETTING, text):
        if setting.startswith("VLLM_"):
            assert setting in envs.environment_variables
            continue
        option, *path = setting.split(".")
        assert option in serve_options(), setting
        config = CONFIGS[option] if path else None
        for name in path:
            config = getattr(config, name)
    if "--speculative-config" in text:
        known = {field.name for field in fields(SpeculativeConfig)}
        assert set(re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", text)) <= known


@all_reasons
def test_advice_exists(reason: Reason):
    check_settings(reason.instead)
    check_settings(re.sub(" of --speculative-config", "", reason.met))


@pytest.mark.parametrize("reason", [*TAIL_FEATURES, tail_room(1, 16, 2)])
def test_advice_for_a_tail_exists(reason: str):
    check_settings(reason)
    # A hybrid's blocks cannot be shortened.
    assert re.search(SETTING, reason) or "turbo_prefill" in reason or "hybrid" in reason


@pytest.mark.parametrize("name", CONNECTORS)
def test_advice_for_a_connector_exists(name: str):
    verdict = CONNECTORS[name]
    whys = [UNKNOWN_WITH_MLA, UNKNOWN_WITH_SPARSE_MLA, CANONICAL_MLA]
    whys += [verdict.reason] * (verdict.state is State.REFUSED)
    way_out = r": (?:use (\w+)|leave it out|leave out canonical_layout)$"
    for why in whys:
        instead = re.search(way_out, why)
        assert instead is not None
        assert not instead[1] or CONNECTORS[instead[1]].state is not State.REFUSED


def appended(function: object) -> set[str]:
    """The constants that a function appends to a list."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return {
        argument.value
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith(".append")
        for argument in call.args
        if isinstance(argument, ast.Constant)
    }


def words_of(backend: type[AttentionBackend], is_on: bool, attn_type: str) -> set[str]:
    """The reasons of vLLM for a configuration with every feature, or with none."""
    parameters = inspect.signature(AttentionBackend.validate_configuration).parameters
    flags = {x: is_on for x in parameters if x.startswith(("use_", "has_"))}
    found = AttentionBackend.validate_configuration.__func__(
        backend,
        head_size=72,
        dtype=torch.int8,
        kv_cache_dtype="turbo4",
        block_size=24,
        device_capability=DeviceCapability(7, 5),
        attn_type=attn_type,
        **flags,
    )
    return set(found)


@pytest.mark.parametrize("backend", [TurboAttentionBackend, TurboMLABackend])
def test_all_words_of_vllm_have_a_reason(backend: type[AttentionBackend]):
    """Each reason of vLLM has a reason of ours; a release with more needs more."""
    for attn_type in AttentionType:
        words = words_of(backend, True, attn_type) | words_of(backend, False, attn_type)
        known = {*BORROWED, *OTHER_KIND, f"attention type {attn_type} not supported"}
        assert words <= known
    assert set(ATTENTION_KINDS) == set(AttentionType)
    # Reasons that neither backend ever has.
    assert appended(AttentionBackend.validate_configuration) - set(BORROWED) == {
        *OTHER_KIND,
        "kv_cache_dtype not supported",
        "non-sparse not supported",
        "per-head quant scales not supported",
        "KV connector not supported",
    }
    assert not backend.is_sparse() and backend.supports_kv_connector()
    assert backend.supports_per_head_quant_scales()
