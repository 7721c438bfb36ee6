# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The documentation lists every refusal, in the words of its message."""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import regex as re
import torch

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import LinearBase
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionBackend, AttentionType
from vllm.v1.attention.backends import turbo_attn
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.turbo_attn import TurboAttentionBackend
from vllm.v1.attention.ops.turbo import choose as kernels
from vllm.v1.attention.ops.turbo.cuda import build as cuda_build
from vllm.v1.attention.ops.turbo.cuda import latent_decode
from vllm.v1.attention.ops.turbo.cuda.decode import DECODE
from vllm.v1.attention.ops.turbo.cuda.family import by_head_size
from vllm.v1.attention.ops.turbo.format import TurboFormat
from vllm.v1.attention.ops.turbo.keys.bias import set_key_offsets
from vllm.v1.attention.ops.turbo.keys.loading import check_key_biases
from vllm.v1.attention.ops.turbo.latent.choose import LatentSource
from vllm.v1.attention.ops.turbo.layer import launching
from vllm.v1.attention.ops.turbo.layer.context_parallel import ContextParallel
from vllm.v1.attention.ops.turbo.layer.prefill import check_image_heads
from vllm.v1.attention.ops.turbo.reasons import MLA_REASONS, REASONS
from vllm.v1.attention.ops.turbo.refusals import (
    LAYER_ARGUMENTS,
    MLA_TAIL,
    SPEC_FEATURES,
    TAIL_FEATURES,
    tail_room,
)
from vllm.v1.attention.ops.turbo.serving.connectors import CONNECTORS, MLA_CONNECTORS
from vllm.v1.attention.ops.turbo.serving.settings import check_layers
from vllm.v1.attention.ops.turbo.serving.startup import check_layer

from ..backend_utils import make_impl, make_layer, make_vllm_config
from ..batch_utils import Batch
from ..rank_utils import RankGroup, Ranks
from .refusal_cases import (
    IMPL_ARGUMENTS,
    PACKED,
    SELECTIONS,
    SPECS,
    WITH_DCP,
    OwnAttention,
    dcp_config,
    fast_prefill_config,
    listed,
    make_builder,
    make_spec,
    mm_prefix_config,
    parallel_config,
    reasons_of,
    select,
    share_with_skipped,
    speculative_config,
    transfer_config,
    with_adaptive_verification,
)
from .refused_page import CASES, PAGE, render


@pytest.fixture(scope="module")
def config(folder: Path) -> VllmConfig:
    return make_vllm_config(folder)


def section(heading: str) -> str:
    """The part of the page below a heading."""
    _, found, text = PAGE.read_text().partition(f"\n## {heading}\n")
    assert found
    return text.partition("\n#")[0]


def documented(heading: str) -> list[str]:
    """The messages of the table below a heading, each with a case or a way out."""
    return re.findall(r"^\| `(.+?)` \|(?: [^|]+ \|)+$", section(heading), re.M)


def backend_reasons() -> Iterator[str]:
    """All reasons of ``validate_configuration``, with every flag that it has."""
    parameters = inspect.signature(AttentionBackend.validate_configuration)
    flags = {
        name: True
        for name in parameters.parameters
        if name.startswith(("use_", "has_"))
    } | {"use_mla": False}
    for attn_type in (AttentionType.ENCODER, AttentionType.ENCODER_DECODER):
        found = TurboAttentionBackend.unsupported_features(
            head_size=72,
            dtype=torch.int8,
            kv_cache_dtype="turbo4",
            block_size=24,
            device_capability=DeviceCapability(7, 5),
            attn_type=attn_type,
            **flags,
        )
        yield from map(str, found)


def update_alone(config: VllmConfig) -> None:
    """Have a layer with an offset of K store tokens that are not the step's."""
    impl = make_impl(config)
    impl.runner.set_key_offset(torch.ones(1, 1, 64))
    impl.do_kv_cache_update(None, *[torch.zeros(1, 1, 64)] * 4)


def see_beyond_a_window(config: VllmConfig) -> None:
    """Plan an image that has more tokens than the window, which nothing clamps."""
    impl = make_impl(config, sliding_window=16)
    batch = Batch.make(impl, [(40, 0)])
    batch.common.mm_req_doc_ranges = {0: [(0, 16)]}
    batch.build(config, impl)


def see_with_large_heads() -> None:
    check_image_heads(TurboFormat.from_cache_dtype("turbo4", 512))


def make_pooled_impl(config: VllmConfig) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(turbo_attn.TurboAttentionImpl, "states_per_token", 4)
        make_impl(dcp_config(config))


def skip_no_layer(config: VllmConfig) -> None:
    config.cache_config.kv_cache_dtype_skip_layers = ["9"]
    check_layers({}, config)


def with_key_bias(config: VllmConfig, layer: Attention) -> torch.nn.Module:
    """A model of one layer, with a bias of K."""
    parent = torch.nn.Module()
    parent.attn = layer
    with set_current_vllm_config(config):
        parent.k_proj = LinearBase(64, 128, disable_tp=True)
    parent.k_proj.bias = torch.nn.Parameter(torch.ones(128))
    model = torch.nn.Module()
    model.layer = parent
    return model


def share_context_with_key_bias(config: VllmConfig) -> None:
    """Set a bias of K in a layer whose context ranks share."""
    layer = make_layer(config)
    layer.impl.runner.context_parallel = ContextParallel(RankGroup(Ranks(2), 0), 1)
    set_key_offsets(with_key_bias(config, layer))


def test_the_list_of_reasons_is_complete(config, tmp_path, monkeypatch):
    """``REASONS`` has exactly the reasons of the cases here. The documentation's table
    is checked against it.
    """
    x = torch.zeros(1, 4, 64)
    forward = partial(make_impl(config).forward, None, x, x, x, x, None, x)
    own_layer = OwnAttention(FlashAttentionBackend, PACKED)
    calls: list[Callable[[], object]] = [
        *(partial(select, **changes) for changes, _ in SELECTIONS.values()),
        *(
            partial(make_impl, config, **changes)
            for changes, _ in IMPL_ARGUMENTS.values()
        ),
        *(partial(make_builder, config, make()) for make, _ in SPECS.values()),
        partial(make_impl, speculative_config(config, "extract_hidden_states")),
        partial(make_impl, parallel_config(config, enable_dbo=True)),
        partial(make_impl, transfer_config(config, "FlexKVConnectorV1")),
        partial(forward, output_scale=torch.ones(())),
        partial(check_layer, "layers.1.attn", own_layer, config),
        partial(skip_no_layer, make_vllm_config(tmp_path)),
        partial(update_alone, config),
        partial(make_impl, fast_prefill_config(config)),
        partial(share_with_skipped, make_vllm_config(tmp_path), 0),
        partial(
            make_builder,
            mm_prefix_config(with_adaptive_verification(config)),
            make_spec(),
        ),
        partial(see_beyond_a_window, make_vllm_config(tmp_path)),
        see_with_large_heads,
        *(
            partial(make_impl, change(config), **arguments)
            for change, arguments, _ in WITH_DCP.values()
        ),
        partial(make_pooled_impl, config),
        partial(share_context_with_key_bias, config),
        lambda: check_key_biases(with_key_bias(config, make_layer(config))),
    ]
    reasons = [reason for call in calls for reason in reasons_of(call)]
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    monkeypatch.setattr(current_platform, "is_cuda", lambda: False)
    reasons += reasons_of(select)
    monkeypatch.setattr(current_platform, "is_cuda", lambda: True)
    reasons += backend_reasons()
    monkeypatch.setattr(turbo_attn, "get_flash_attn", lambda head_size: None)
    reasons += reasons_of(partial(make_impl, config))
    assert {listed(reason) for reason in reasons} == set(REASONS)
    assert len(set(REASONS)) == len(REASONS)
    assert {*LAYER_ARGUMENTS, *SPEC_FEATURES} <= set(REASONS)


def test_every_refusal_is_documented():
    assert documented("Refused") == list(map(str, REASONS))
    assert documented("Refused with MLA") == list(map(str, MLA_REASONS))
    assert set(CASES) == {*REASONS, *MLA_REASONS}


def test_another_backend_is_documented():
    (text,) = reasons_of(partial(select, AttentionBackendEnum.FLASH_ATTN))
    assert text.replace("FLASH_ATTN", "<name>") in " ".join(PAGE.read_text().split())


def test_the_page_is_current():
    """The page is what ``serving/refused_page.py`` writes."""
    assert PAGE.read_text() == render()


def test_every_lack_of_a_tail_is_documented():
    reasons = re.findall(r"^\* `(.+)`$", section("No recent window"), re.M)
    assert reasons == [*TAIL_FEATURES, *returned(tail_room), MLA_TAIL]


def test_every_connector_is_documented():
    row = r"^\| `(.+)` \| (.+?) \| (yes|refused) \| (.+) \|$"
    rows = re.findall(row, section("KV connectors"), re.M)
    assert [(name, state, why) for name, state, _, why in rows] == [
        (name, verdict.state.value, verdict.reason)
        for name, verdict in CONNECTORS.items()
    ]
    assert {name for name, _, of_mla, _ in rows if of_mla == "yes"} == MLA_CONNECTORS


def template(text: ast.expr) -> str:
    """A message in a source, with <name> for each value."""
    if isinstance(text, ast.Constant):
        return text.value if isinstance(text.value, str) else ""
    parts = text.values if isinstance(text, ast.JoinedStr) else []
    return "".join(
        f"<{ast.unparse(part.value).rpartition('.')[2]}>"
        if isinstance(part, ast.FormattedValue)
        else template(part)
        for part in parts
    )


def first_arguments(module: ModuleType, function: str) -> list[str]:
    """The first arguments of all calls of a function in a module."""
    calls = [
        node
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == function
    ]
    return [template(call.args[0]) for call in calls]


def assigned(module: ModuleType, name: str) -> list[str]:
    """The messages that a module assigns to a name."""
    values = [
        node.value
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name
    ]
    return [text for text in map(template, values) if text]


def returned(function: Callable) -> list[str]:
    """The messages that a function may return."""
    source = textwrap.dedent(inspect.getsource(function))
    returns = [
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Return)
    ]
    found = [template(value) for value in returns if value is not None]
    return [text for text in found if text]


def test_every_lack_of_cuda_kernels_is_documented():
    reasons = [
        *returned(kernels.TurboSource.unsupported_reason),
        *(x.replace("<title>", DECODE.title) for x in returned(by_head_size)),
        *returned(LatentSource.unsupported_reason),
        *returned(latent_decode.unsupported_reason),
        *returned(kernels.refusal_of_other_ranks),
        *assigned(launching, "reason"),
        *first_arguments(turbo_attn, "cuda_refusal"),
        *first_arguments(cuda_build, "_failure"),
    ]
    assert len(reasons) > 5
    assert sorted(documented("No CUDA kernels")) == sorted(reasons)
