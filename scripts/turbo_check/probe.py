# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The part of `child.py` that runs in the workers of vLLM.

`Recorder` reduces distributions in the worker: of 150,000 log-probabilities a position,
it keeps those of the reference's likeliest tokens, and the sum of the rest.
`KeyStatistics` sees the K and V that attention layers get.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.attention import Attention
from vllm.v1.worker.gpu.sample.logits_processor import (
    LogitsContext,
    LogitsProcessor,
    LogitsProcRequestState,
)

# In a request's `extra_args`: see `Record.of`.
WATCH = "check_model"


@dataclass
class Record:
    """One request's distributions, in the order of the tokens that are replayed.

    Attributes:
        path: The .npz file that `save` writes.
        first: Position of the last prompt token, whose logits are the first.
        targets: The tokens replayed.
        ids: (position, k), the reference's likeliest tokens, falling; -1 where none
            are known yet.
        logprobs: (position, k + 1), of these, and of all others together.
        target: (position,), log-probability of the token replayed.
        top: (position,), the likeliest token.
        is_reference: Whether this engine chooses `ids`.

    """

    path: Path
    first: int
    targets: list[int]
    ids: np.ndarray
    logprobs: np.ndarray
    target: np.ndarray
    top: np.ndarray
    is_reference: bool

    @classmethod
    def of(cls, params: SamplingParams) -> "Record":
        """Returns the record that `extra_args` ask for.

        They have `path`, `first`, `count` (k), and `reference`: the path of the
        reference's record; None for the reference itself.
        """
        assert params.extra_args and params.trace_decode_token_ids
        watch = params.extra_args[WATCH]
        steps = len(params.trace_decode_token_ids)
        ids = np.full((steps, watch["count"]), -1, dtype=np.int64)
        if watch["reference"]:
            ids = np.load(watch["reference"])["ids"]
        return cls(
            path=Path(watch["path"]),
            first=watch["first"],
            targets=params.trace_decode_token_ids,
            ids=ids,
            logprobs=np.full((steps, ids.shape[1] + 1), np.nan, dtype=np.float32),
            target=np.full(steps, np.nan, dtype=np.float32),
            top=np.full(steps, -1, dtype=np.int64),
            is_reference=not watch["reference"],
        )

    def save(self) -> None:
        """Writes the file.

        Raises:
            RuntimeError: If a step was not seen, or its logits are no numbers.

        """
        steps = len(self.targets)
        if missing := int((self.top < 0).sum()):
            raise RuntimeError(
                f"{missing} of {steps} decode steps of {self.path.stem} were not seen: "
                "this engine does not run the steps that check_model replays; try "
                "--engine-args '{\"max_num_seqs\": 1}'"
            )
        if broken := int(np.isnan(self.logprobs).any(axis=1).sum()):
            raise RuntimeError(
                f"the logits of {broken} of {steps} decode steps of {self.path.stem} "
                "are not numbers (NaN): the model cannot be served with this cache "
                "dtype; leave it out of --kv-cache-dtype"
            )
        np.savez(
            self.path,
            ids=self.ids,
            logprobs=self.logprobs,
            target=self.target,
            top=self.top,
        )


class Recorder(LogitsProcessor):
    """Records the distributions of requests that ask for it, and changes no logits.

    It runs in every rank that samples; the first of a tensor-parallel group writes.
    """

    def __init__(
        self, vllm_config: VllmConfig, req_states: LogitsProcRequestState
    ) -> None:
        self.slots: dict[int, Record] = {}
        # A preempted request comes again, with the tokens that it has generated.
        self.records: dict[str, Record] = {}

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        self.slots.pop(req_idx, None)
        watch = (sampling_params.extra_args or {}).get(WATCH)
        if watch is None or get_tensor_model_parallel_rank():
            return False
        if watch["path"] not in self.records:
            self.records[watch["path"]] = Record.of(sampling_params)
        self.slots[req_idx] = self.records[watch["path"]]
        return True

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        """See base class: logits are (row, vocabulary) fp32, before temperature."""
        positions = ctx.pos.tolist()
        due: list[tuple[int, Record, int]] = []
        for row, slot in enumerate(ctx.idx_mapping_np.tolist()):
            record = self.slots.get(slot)
            if record is None:
                continue
            # It is negative in a chunk of the prompt.
            step = positions[row] - record.first
            if 0 <= step < len(record.targets):
                due.append((row, record, step))
        if due:
            self.record(logits, due)
        return logits

    def record(self, logits: torch.Tensor, due: list[tuple[int, Record, int]]) -> None:
        """Records rows of logits; `due` has each row, its record and its step."""
        chosen = logits[[row for row, *_ in due]].log_softmax(dim=-1)
        k = due[0][1].ids.shape[1]
        for (_, record, step), ids in zip(due, chosen.topk(k).indices.cpu().numpy()):
            record.top[step] = ids[0]
            if record.is_reference:
                record.ids[step] = ids
        ids = torch.from_numpy(np.stack([record.ids[step] for _, record, step in due]))
        ids = ids.to(chosen.device)
        targets = torch.tensor([[record.targets[step]] for _, record, step in due])
        kept = [chosen.gather(1, ids), chosen.gather(1, targets.to(chosen.device))]
        # Not 1 minus the others, which is mostly rounding error where it is small.
        rest = chosen.scatter(1, ids, -torch.inf).logsumexp(dim=-1, keepdim=True)
        values = torch.cat([*kept, rest], dim=1).cpu().numpy()
        for (_, record, step), row in zip(due, values):
            record.logprobs[step] = np.delete(row, k)
            record.target[step] = row[k]
            if step == len(record.targets) - 1:
                record.save()
                self.records.pop(str(record.path), None)


class Sums:
    """Sums over tokens of a layer's vectors, by head."""

    def __init__(self) -> None:
        self.count = 0
        self.total: torch.Tensor | float = 0.0
        self.squares: torch.Tensor | float = 0.0

    def add(self, vectors: torch.Tensor) -> None:
        """Adds (token, head, coordinate)."""
        # A long mean leaves few digits of fp32 to the deviation from it.
        vectors = vectors.detach().double()
        self.count += len(vectors)
        self.total = self.total + vectors.sum(0).cpu()
        self.squares = self.squares + vectors.square().sum((0, 2)).cpu()

    def mean(self) -> torch.Tensor:
        """Returns (head, coordinate)."""
        return torch.as_tensor(self.total / self.count)

    def square(self) -> torch.Tensor:
        """Returns the mean of the squared length, (head,)."""
        return torch.as_tensor(self.squares / self.count)


class KeyStatistics:
    """Statistics of one layer's Q, K and V, of this rank's heads."""

    def __init__(self, layer: Attention) -> None:
        self.layer = layer
        self.sums = {name: Sums() for name in "qkv"}
        # K less the offset that a turbo dtype takes off it.
        self.stored = Sums()

    def wrap(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a forward of the layer's impl that also adds up its inputs.

        Impls are called alike whether or not the model is compiled.
        """

        def watched(
            layer: Attention,
            query: torch.Tensor,
            key: torch.Tensor | None,
            value: torch.Tensor | None,
            kv_cache: torch.Tensor,
            attn_metadata: Any,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            # A layer that shares another's cache has no K and V.
            if key is not None and value is not None:
                count = getattr(attn_metadata, "num_actual_tokens", len(key))
                for name, vectors in zip("qkv", (query, key, value)):
                    self.sums[name].add(vectors[:count])
                self.stored.add(self.as_stored(key[:count], attn_metadata))
            rest = (query, key, value, kv_cache, attn_metadata, *args)
            return forward(layer, *rest, **kwargs)

        return watched

    def as_stored(self, key: torch.Tensor, attn_metadata: Any) -> torch.Tensor:
        """Returns K, (token, head, coordinate), less the layer's offset, if any."""
        table = getattr(self.layer, "turbo_key_offset", None)
        if table is None or attn_metadata is None:
            return key
        # A vLLM with the table has this module.
        from vllm.v1.attention.ops.turbo.reference import offsets_of

        offset = attn_metadata.key_offset(table)
        return key.float() - offsets_of(offset, len(key))

    def result(self) -> dict[str, Any]:
        """Returns lists of one number per KV head.

        `k_mean` and `v_mean` are the length of the mean over tokens, `k_deviation` and
        `v_deviation` the root of the mean squared distance from it. `k_left` is the
        length of the mean of stored K, which lacks the layer's offset. `score` is the
        factor from K's relative errors to errors of scores: the deviation of scores if
        Q and stored K had random directions.
        """
        q, k, v = (self.sums[name] for name in "qkv")
        heads = k.square().shape[0]
        spread = {
            name: (s.square() - s.mean().square().sum(-1)).clamp(min=0)
            for name, s in (("k", k), ("v", v))
        }
        q_square = q.square().view(heads, -1).mean(-1)
        size = k.mean().shape[-1]
        squares = q_square * self.stored.square() / size
        score = self.layer.impl.scale * squares.sqrt()
        return {
            "k_mean": k.mean().norm(dim=-1).tolist(),
            "k_deviation": spread["k"].sqrt().tolist(),
            "k_left": self.stored.mean().norm(dim=-1).tolist(),
            "v_mean": v.mean().norm(dim=-1).tolist(),
            "v_deviation": spread["v"].sqrt().tolist(),
            "score": score.tolist(),
        }


# Statistics of this worker's attention layers, by name.
watched_layers: dict[str, KeyStatistics] = {}


def start_watching(model: nn.Module) -> None:
    """Lets each attention layer of a model add up its inputs from now on."""
    for layer in model.modules():
        if isinstance(layer, Attention):
            statistics = watched_layers[layer.layer_name] = KeyStatistics(layer)
            forward = statistics.wrap(layer.impl.forward)
            layer.impl.forward = forward  # type: ignore[method-assign]


def stop_watching(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Undoes `start_watching`, and returns the statistics by layer name."""
    found = {}
    for layer in model.modules():
        if isinstance(layer, Attention):
            # The class's own method is visible again.
            del layer.impl.forward
            statistics = watched_layers.pop(layer.layer_name)
            if statistics.sums["k"].count:
                found[layer.layer_name] = statistics.result()
    return found
