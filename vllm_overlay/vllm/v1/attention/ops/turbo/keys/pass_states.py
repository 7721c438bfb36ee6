# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""States for a pass of a text through a hybrid model, which has no cache yet."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.utils.math_utils import cdiv
from vllm.v1.attention.backend import CommonAttentionMetadata

# The first place for states, behind one that vLLM keeps for padding.
FIRST_PLACE = 1


def state_layers(model: nn.Module, vllm_config: VllmConfig) -> dict[str, MambaBase]:
    """The layers of a model that have a state, by name."""
    own = set(map(id, model.modules()))
    layers = get_layers_from_vllm_config(vllm_config, MambaBase)  # type: ignore
    return {name: layer for name, layer in layers.items() if id(layer) in own}


class PassStates:
    """The states of a hybrid's layers in a pass, and the metadata of slices.

    A slice is of the text, or of sequences of one token. No later slice reads the
    states of these, so all layers of a kind have the same memory for them.

    Args:
        layers: The layers with states, by name.
        others: The names of layers that attend without metadata.
        num_text: Tokens of the text, which come first.
        num_tokens: All tokens.
        vllm_config: The engine's configuration.
        device: The device of the states.

    """

    def __init__(
        self,
        layers: dict[str, MambaBase],
        others: list[str],
        num_text: int,
        num_tokens: int,
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        self.layers = layers
        self.others = others
        self.num_text = num_text
        self.device = device
        specs: dict[str, Any] = {
            name: layer.get_kv_cache_spec(vllm_config) for name, layer in layers.items()
        }
        self.builders: dict[tuple[type, Any], Any] = {}
        for name, layer in layers.items():
            key = layer.get_attn_backend().get_builder_cls(), specs[name]
            if key not in self.builders:
                self.builders[key] = key[0](key[1], [name], vllm_config, device)
        self.num_columns = 1 + max(
            cdiv(num_text, spec.block_size) + spec.num_speculative_blocks
            for spec in specs.values()
        )
        shared = {
            spec: self._pages(spec, num_tokens - num_text)
            for spec in dict.fromkeys(specs.values())
        }
        self.specs = specs
        self.text_pages = {name: self._pages(spec, 1) for name, spec in specs.items()}
        self.other_pages = {name: shared[spec] for name, spec in specs.items()}

    def _pages(self, spec: Any, count: int) -> torch.Tensor:
        """Memory for so many states of a layer, (places, 1, 1, bytes) int8."""
        shape = FIRST_PLACE + count, 1, 1, spec.state_content_size_bytes
        return torch.zeros(shape, dtype=torch.int8, device=self.device)

    @contextmanager
    def bound(self) -> Iterator[None]:
        """Take the states of slices from the layers at the end."""
        # Some classes have no attribute before a cache is there.
        before = {name: vars(x).get("kv_cache") for name, x in self.layers.items()}
        try:
            yield
        finally:
            for name, layer in self.layers.items():
                vars(layer).pop("kv_cache", None)
                if before[name] is not None:
                    layer.kv_cache = before[name]

    def begin(self, start: int, end: int) -> dict[str, Any]:
        """Let layers have the states of a slice.

        Args:
            start: The first token.
            end: The token after the last one.

        Returns:
            The metadata of all layers, None for those that attend.

        """
        is_text = start < self.num_text
        pages = self.text_pages if is_text else self.other_pages
        for name, layer in self.layers.items():
            layer.bind_kv_cache(pages[name])
        lens = [end - start] if is_text else [1] * (end - start)
        common = self._common(lens, [end] if is_text else lens)
        built = {key: x.build(0, common) for key, x in self.builders.items()}
        found = {
            name: built[layer.get_attn_backend().get_builder_cls(), self.specs[name]]
            for name, layer in self.layers.items()
        }
        return dict.fromkeys(self.others) | found

    def _common(self, lens: list[int], seq_lens: list[int]) -> CommonAttentionMetadata:
        """The metadata of sequences' new tokens behind others, if they are prompts."""
        starts = torch.tensor([0, *lens], dtype=torch.int32, device="cpu")
        starts = starts.cumsum(0, dtype=torch.int32)
        seq_lens_cpu = torch.tensor(seq_lens, dtype=torch.int32, device="cpu")
        places = torch.arange(len(lens), dtype=torch.int32, device=self.device)
        num_tokens = sum(lens)
        return CommonAttentionMetadata(
            query_start_loc=starts.to(self.device),
            query_start_loc_cpu=starts,
            seq_lens=seq_lens_cpu.to(self.device),
            num_reqs=len(lens),
            num_actual_tokens=num_tokens,
            max_query_len=max(lens),
            max_seq_len=max(seq_lens),
            # A sequence has one place, whatever the block of its last token.
            block_table_tensor=(places + FIRST_PLACE)[:, None].repeat(
                1, self.num_columns
            ),
            slot_mapping=torch.zeros(num_tokens, dtype=torch.int64, device=self.device),
            is_prefilling=torch.ones(len(lens), dtype=torch.bool, device="cpu"),
            seq_lens_cpu_upper_bound=seq_lens_cpu,
        )
