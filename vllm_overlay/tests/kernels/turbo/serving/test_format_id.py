# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The format ID of turbo pages: the layout, the dtypes of layers, and the checkpoint's
offset of K, for any division of layers and heads among ranks.
"""

from pathlib import Path

import pytest
import torch
from torch import nn

from vllm.config import VllmConfig, get_layers_from_vllm_config, set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backends.turbo_tail import TurboTail
from vllm.v1.attention.ops.turbo.format import LAYOUT_VERSION
from vllm.v1.attention.ops.turbo.formats import tail as tail_format
from vllm.v1.attention.ops.turbo.keys import bias as key_bias
from vllm.v1.attention.ops.turbo.keys import offset as key_offset
from vllm.v1.attention.ops.turbo.serving import format_id
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, KVCacheSpec, kv_cache_format_id
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from ..backend_utils import make_vllm_config
from ..keys.test_key_bias import SelfAttention, load_biases, set_rank
from ..utils import BF16

NUM_LAYERS = 2

pytestmark = pytest.mark.usefixtures("rank_config")


class Group:
    """A stand-in for a group of ranks, with the words that other ranks say.

    Attributes:
        said: The word of each rank; None: the same as this rank's.

    """

    def __init__(self, rank: int, said: list[object]):
        self.rank_in_group = rank
        self.world_size = len(said)
        self.said = said
        self.cpu_group = self

    def gather(self, found: list[object], own: object, group: object) -> None:
        assert group is self
        self.said[self.rank_in_group] = own
        found[:] = [own if each is None else each for each in self.said]


def make_model(
    folder: Path,
    layers: range = range(NUM_LAYERS),
    scale: float = 1.0,
    skipped: tuple[str, ...] = (),
    bias: bool = True,
    dtype: str = "turbo4",
) -> VllmConfig:
    """The configuration of an engine with some layers of a model with a bias of K."""
    config = make_vllm_config(folder, dtype)
    config.cache_config.kv_cache_dtype_skip_layers = list(skipped)
    model = nn.Module()
    with set_current_vllm_config(config), set_default_torch_dtype(BF16):
        for index in layers:
            attention = SelfAttention(config, index, bias=bias)
            if bias:
                load_biases(attention.qkv_proj)
                # Layers have different biases.
                attention.qkv_proj.bias.data *= scale + index
            model.add_module(str(index), attention)
    key_bias.set_key_offsets(model)
    return config


def specs_of(
    config: VllmConfig, model: nn.Module | None = None
) -> dict[str, KVCacheSpec]:
    """The specs of the layers, as the worker reports them. There is no model to run."""
    config.attention_config.turbo_means = "off"
    worker = object.__new__(Worker)
    worker.vllm_config = config
    worker.model_runner = runner = object.__new__(GPUModelRunner)
    runner.vllm_config, runner.speculator = config, None
    runner.model = nn.Module() if model is None else model
    return worker.get_kv_cache_spec()


def word_of(config: VllmConfig) -> str:
    """The format ID that all specs of an engine have."""
    (word,) = {spec.format_id for spec in specs_of(config).values()}
    return word


def test_worker_tells_the_format(folder: Path):
    specs = specs_of(make_model(folder, bias=False))
    assert len(specs) == NUM_LAYERS
    groups = [KVCacheGroupSpec([name], spec) for name, spec in specs.items()]
    assert kv_cache_format_id("turbo4", groups) == f"turbo4.{LAYOUT_VERSION}"


def test_a_bias_that_no_loader_let_be_read(folder: Path):
    """Some loaders process weights by themselves, or do not process them at all."""
    config = make_vllm_config(folder)
    with set_current_vllm_config(config), set_default_torch_dtype(BF16):
        module = SelfAttention(config, 0)
    load_biases(module.qkv_proj)
    with pytest.raises(ValueError, match="in layers 0 .*--load-format auto"):
        specs_of(config, nn.ModuleList([module]))


def test_other_dtypes_have_no_id(folder: Path):
    assert word_of(make_model(folder, bias=False, dtype="auto")) == ""


def test_another_layout(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """A release with another layout does not find pages of this one."""
    configs = [make_model(folder, bias=bias) for bias in (False, True)]
    words = [word_of(config) for config in configs]
    monkeypatch.setattr(format_id, "LAYOUT_VERSION", LAYOUT_VERSION + 1)
    assert len({*words, *map(word_of, configs)}) == 4


def test_equal_offsets_agree(folder: Path):
    words = {word_of(make_model(folder)) for _ in range(2)}
    assert len(words) == 1
    assert words != {word_of(make_model(folder, bias=False))}


def test_other_offsets_differ(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Other biases have another ID, and so has another rule for the same biases."""
    words = [word_of(make_model(folder)), word_of(make_model(folder, scale=1.5))]
    monkeypatch.setattr(key_offset, "VERSION", key_offset.VERSION + 1)
    words.append(word_of(make_model(folder)))
    assert len(set(words)) == 3


def test_other_layers_in_the_models_dtype_differ(folder: Path):
    """IDs differ even if blocks have equally many bytes."""
    choices: list[tuple[str, ...]] = [(), ("0",), ("1",)]
    words = [word_of(make_model(folder, bias=False, skipped=x)) for x in choices]
    assert len(set(words)) == len(choices)
    again = word_of(make_model(folder, bias=False, skipped=choices[1]))
    assert again == words[1]


def set_ranks(monkeypatch: pytest.MonkeyPatch, tp: Group, pp: Group) -> None:
    monkeypatch.setattr(format_id, "get_tp_group", lambda: tp)
    monkeypatch.setattr(format_id, "get_pp_group", lambda: pp)

    def gather(found: list[object], own: object, group: Group) -> None:
        group.gather(found, own, group)

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    set_rank(monkeypatch, tp.rank_in_group, tp.world_size)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_heads_of_other_ranks_count(folder, monkeypatch, num_ranks):
    """The ID is that of one rank, if ranks have several heads, one, or a replica."""
    word = word_of(make_model(folder))
    said: list[object] = [None] * num_ranks
    words: list[set[str]] = []
    # In the first round each rank knows only its own share.
    for _ in range(2):
        words.append(set())
        for rank in range(num_ranks):
            set_ranks(monkeypatch, Group(rank, said), Group(0, [None]))
            words[-1].add(word_of(make_model(folder)))
    assert words[1] == {word}
    assert words[0] != words[1]


def test_layers_of_other_stages_count(folder: Path, monkeypatch: pytest.MonkeyPatch):
    word = word_of(make_model(folder))
    said: list[object] = [None] * NUM_LAYERS
    words: list[set[str]] = []
    for _ in range(2):
        words.append(set())
        for stage in range(NUM_LAYERS):
            set_ranks(monkeypatch, Group(0, [None]), Group(stage, said))
            words[-1].add(word_of(make_model(folder, range(stage, stage + 1))))
    assert words[1] == {word}
    assert words[0] != words[1]


def test_tails_have_a_word_of_their_own(folder, monkeypatch):
    """A tail's pages are not kept, so that kept pages are found with any tail."""
    config = make_model(folder, bias=False)
    config.attention_config.turbo_window = "auto"
    config.cache_config.block_size = 64
    name, layer = next(iter(get_layers_from_vllm_config(config, Attention).items()))
    tail = TurboTail(name, layer.impl.runner.layout, 16, 1)
    tail.is_draft_layer = False
    spec = tail.get_kv_cache_spec(config)
    assert spec is not None
    specs = format_id.with_format_ids({"window": spec}, config)
    assert specs["window"].format_id == f"window{tail_format.VERSION}"
