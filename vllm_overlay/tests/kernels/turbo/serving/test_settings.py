# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Settings that name no layer are refused; settings without effect get a warning."""

from pathlib import Path

import pytest
import regex as re

from vllm.config import AttentionConfig, CacheConfig, VllmConfig
from vllm.config.utils import get_attr_docs
from vllm.platforms import current_platform
from vllm.platforms.interface import Platform
from vllm.v1.attention.backends import cache_dtype
from vllm.v1.attention.ops.turbo.format import TURBO_PRESETS, TurboFormat
from vllm.v1.attention.ops.turbo.serving import settings

from ..backend_utils import make_layer, make_vllm_config
from .refusal_cases import (
    parallel_config,
    reasons_of,
    serve_parser,
    speculative_config,
)

platforms = pytest.mark.parametrize("platform", [Platform, current_platform])
NUM_LAYERS, WITH_CACHE = 4, 3


def make_config(
    folder: Path, *skipped: str, name: str = "turbo4", **layer: int
) -> VllmConfig:
    """The configuration of a model of four layers; the first three have K and V."""
    config = make_vllm_config(folder, name, num_hidden_layers=NUM_LAYERS)
    config.cache_config.kv_cache_dtype_skip_layers = list(skipped)
    for _ in range(WITH_CACHE):
        make_layer(config, **layer)
    return config


def check(config: VllmConfig, platform: type[Platform] = Platform) -> None:
    platform.update_block_size_for_backend(config)


@platforms
@pytest.mark.parametrize("entry", ["99", "4", "first", "-1", "00", ""])
def test_no_such_layer(folder, platform, entry):
    (text,) = reasons_of(lambda: check(make_config(folder, "1", entry), platform))
    assert text.startswith(f"--kv-cache-dtype-skip-layers {entry}: no layer has such")
    assert "(supported: 0 to 2, sliding_window; " in text


def test_all_entries_that_name_no_layer_are_listed(folder):
    (text,) = reasons_of(lambda: check(make_config(folder, "x", "0", "7")))
    assert "--kv-cache-dtype-skip-layers x 7: no layer" in text


@platforms
def test_layers_that_are_there(folder, platform, log):
    check(make_config(folder, "0", "2"), platform)
    assert log.warnings == []


def test_a_layer_without_k_and_v(folder, log):
    """A layer without K and V exists, such as a hybrid's layer with a state."""
    check(make_config(folder, "0", "3"))
    (line,) = log.warnings
    assert line.startswith("--kv-cache-dtype-skip-layers 3: no effect")


@pytest.mark.parametrize("window, expected", [(None, 1), (64, 0)])
def test_windows_that_are_not_there(folder, log, window, expected):
    config = make_config(folder, "sliding_window")
    make_layer(config, per_layer_sliding_window=window)
    check(config)
    assert len(log.warnings) == expected
    assert all("sliding_window: no effect" in line for line in log.warnings)


def test_layers_of_other_stages(folder, log):
    """A rank of a pipeline has a part of the layers, and knows their number."""
    config = make_config(folder, "3", "sliding_window")
    config = parallel_config(config, pipeline_parallel_size=2)
    check(config)
    assert log.warnings == []
    config.cache_config.kv_cache_dtype_skip_layers = ["4"]
    (text,) = reasons_of(lambda: check(config))
    assert "(supported: 0 to 3, sliding_window; " in text


@platforms
def test_all_layers_are_left_out(folder, platform, log):
    check(make_config(folder, "0", "1", "2"), platform)
    (line,) = log.warnings
    assert re.fullmatch(
        r"KV cache turbo4: 0 of 3 layers are packed, because "
        r"--kv-cache-dtype-skip-layers 0 1 2 leaves all of them out\.",
        line,
    )


def test_a_model_without_k_and_v(folder, log):
    config = make_vllm_config(folder)
    settings.check_layers({}, config)
    (line,) = log.warnings
    assert "0 of 0 layers are packed, because this model has no layers" in line


OPTIONS = {
    "turbo_prefill": "stored",
    "turbo_kernel": "triton",
    "turbo_window": 16,
    "turbo_means": "off",
}


@platforms
@pytest.mark.parametrize("option", OPTIONS)
def test_options_of_other_dtypes(folder, platform, log, option):
    config = make_config(folder, name="auto")
    config.attention_config = AttentionConfig()
    check(config, platform)
    assert log.warnings == []
    setattr(config.attention_config, option, OPTIONS[option])
    check(config, platform)
    assert log.warnings == [
        f"--attention-config.{option} {OPTIONS[option]}: no effect with "
        "--kv-cache-dtype auto. Pass turbo4, k4v3 or turbo3."
    ]


def test_all_options_are_known(folder):
    config = make_vllm_config(folder, "auto")
    names = {name for name in vars(config.attention_config) if "turbo_" in name}
    assert names == set(cache_dtype.OPTIONS) == set(OPTIONS)


def test_options_that_have_an_effect(folder, log):
    """Options have an effect if one layer, here a drafter's, has a turbo dtype."""
    config = speculative_config(make_config(folder, name="auto"), "draft_model")
    config.speculative_config.kv_cache_dtype = "turbo4"
    config.attention_config.turbo_prefill = "stored"
    drafter = make_config(folder)
    layer = make_layer(drafter, prefix="draft.9.attn")
    config.compilation_config.static_forward_context[layer.layer_name] = layer
    check(config)
    assert log.warnings == []


@pytest.mark.parametrize("option", OPTIONS)
def test_options_are_found(option, monkeypatch, capsys):
    """Help lists the options, and the parser suggests them for similar arguments."""
    parser, name = serve_parser(), f"--attention-config.{option}"
    monkeypatch.setattr(parser, "_search_keyword", "turbo")
    assert f"{name} " in parser.format_help()
    for given in (f"--{option}", name.replace("_", "-")):
        with pytest.raises(SystemExit):
            parser.parse_args([given, "1"])
        assert f"did you mean {name}?" in capsys.readouterr().err


def test_dtypes_and_options_are_explained():
    help_text = get_attr_docs(CacheConfig)["cache_dtype"]
    assert all(f'"{name}"' in help_text for name in TURBO_PRESETS)
    for name in TURBO_PRESETS:
        ratio = 4 * 128 / TurboFormat.from_cache_dtype(name, 128).slot_size
        assert f"1/{ratio:.2f}" in help_text
    assert all(option in help_text for option in OPTIONS)
    assert set(OPTIONS) <= set(get_attr_docs(AttentionConfig))
