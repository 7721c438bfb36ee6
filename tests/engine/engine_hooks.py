# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Changes of vLLM in an engine's process: a record of steps, and planted defects."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from turbo_equality.child import zeroed_attention

from vllm import LLM
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.sparse_mla_attention import (
    SparseMLACommonMetadata,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.mla.turbo_mla_sparse import TurboMLASparseImpl
from vllm.v1.attention.backends.turbo_attn import TurboMetadata, TurboMetadataBuilder
from vllm.v1.attention.ops.turbo import interface
from vllm.v1.attention.ops.turbo.keys import bias as key_bias
from vllm.v1.attention.ops.turbo.keys import loading
from vllm.v1.attention.ops.turbo.keys import offset as key_offset
from vllm.v1.attention.ops.turbo.reference import latent as latent_reference
from vllm.v1.attention.ops.turbo.serving.weight_updates import WeightUpdates
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.spec_decode.gemma4 import Gemma4Proposer
from vllm.v1.worker.gpu.spec_decode.gemma4.speculator import Gemma4Speculator

Change = AbstractContextManager[object]
# The step of a call before which an engine loads other weights in mid-request: prompts
# are prefilled by then, and some tokens generated.
RELOADING_STEP = 6


class StepRecorder:
    """Notes the scheduler's steps and preemptions.

    Attributes:
        steps: By step that ran tokens, each request's (new, already computed) tokens.
        num_preemptions: Requests that were put back into the queue.

    """

    def __init__(self) -> None:
        self.steps: list[list[tuple[int, int]]] = []
        self.num_preemptions = 0

    @contextmanager
    def watching(self) -> Iterator["StepRecorder"]:
        schedule, preempt = Scheduler.schedule, Scheduler._preempt_request

        def watched_schedule(scheduler: Scheduler, *args: Any, **kwargs: Any) -> Any:
            output = schedule(scheduler, *args, **kwargs)
            cached = output.scheduled_cached_reqs
            computed = dict(zip(cached.req_ids, cached.num_computed_tokens))
            for request in output.scheduled_new_reqs:
                computed[request.req_id] = request.num_computed_tokens
            new = output.num_scheduled_tokens.items()
            if new:
                self.steps.append([(num, computed[name]) for name, num in new])
            return output

        def watched_preempt(scheduler: Scheduler, *args: Any, **kwargs: Any) -> Any:
            self.num_preemptions += 1
            return preempt(scheduler, *args, **kwargs)

        with (
            patch.object(Scheduler, "schedule", watched_schedule),
            patch.object(Scheduler, "_preempt_request", watched_preempt),
        ):
            yield self

    def result(self, requests: list[dict[str, Any]]) -> dict[str, Any]:
        """Returns the result of a call that was watched."""
        counted = {"steps": self.steps, "num_preemptions": self.num_preemptions}
        return {"requests": requests} | counted


def nan_embedding(token: int) -> Change:
    """Makes one token's embedding NaN, and with it all that is computed from it."""
    forward = VocabParallelEmbedding.forward

    def broken_forward(
        layer: VocabParallelEmbedding, input_: torch.Tensor, *args: Any
    ) -> torch.Tensor:
        embedded = forward(layer, input_, *args)
        return embedded.masked_fill((input_ == token).unsqueeze(-1), float("nan"))

    return patch.object(VocabParallelEmbedding, "forward", broken_forward)


def without_key_offset() -> Change:
    """Lets layers store K with the bias that the model adds to it."""
    return patch.object(loading, "set_key_offsets", lambda model: None)


def fixed_key_offset() -> Change:
    """Lets layers keep the offset of K that they start with, whatever their weights."""
    return patch.object(WeightUpdates, "before_step", lambda updates, step: None)


def short_offset_segments(size: int) -> Change:
    """Lets `size` tokens share an offset of K."""
    return patch.object(interface, "OFFSET_SEGMENT", size)


@contextmanager
def misled_drafter() -> Iterator[None]:
    """Lets Gemma 4's drafter read the first caches of each kind, and not the last."""

    def misled(wire: Callable[..., None]) -> Callable[..., None]:
        def misled_wire(drafter: Any, *args: Any) -> None:
            wire(drafter, *args)
            layers = get_layers_from_vllm_config(drafter.vllm_config, Attention)
            targets = args[-1]
            for name in layers.keys() - targets:
                window = layers[name].sliding_window
                layers[name].kv_sharing_target_layer_name = min(
                    target
                    for target in targets
                    if layers[target].sliding_window == window
                )

        return misled_wire

    name = "_setup_gemma4_kv_sharing"
    with ExitStack() as stack:
        for drafter in (Gemma4Proposer, Gemma4Speculator):
            wiring = misled(getattr(drafter, name))
            stack.enter_context(patch.object(drafter, name, wiring))
        yield


def masked_attention() -> Change:
    """Lets sparse MLA score all tokens of a request in fp32, with a mask on those that
    are not listed or that a token does not see.
    """

    def attend(
        impl: TurboMLASparseImpl,
        q: tuple[torch.Tensor, torch.Tensor],
        kv_cache: torch.Tensor,
        metadata: SparseMLACommonMetadata,
        layer: object,
    ) -> tuple[torch.Tensor, None]:
        query, lists = torch.cat(q, -1).float(), impl.topk_indices_buffer
        output = torch.empty_like(q[0])
        starts = metadata.query_start_loc.tolist()
        for row, length in enumerate(metadata.seq_lens.tolist()):
            begin, end = starts[row : row + 2]
            positions = torch.arange(length)
            blocks = metadata.block_table[row, positions // metadata.block_size].long()
            slots = blocks * metadata.block_size + positions % metadata.block_size
            pages = kv_cache.view(torch.uint8)
            latent, rope = latent_reference.load(pages, slots, impl.runner.layout)
            key = torch.cat([latent, rope], -1)
            seen = (lists[begin:end, :, None] == positions).any(1)
            seen &= positions <= torch.arange(length - (end - begin), length)[:, None]
            scores = query[begin:end] @ key.T * impl.scale
            scores.masked_fill_(~seen[:, None], float("-inf"))
            attended = scores.softmax(-1) @ latent
            if impl.runner.mean is not None:
                attended += impl.runner.mean.rotated
            output[begin:end] = attended
        return output, None

    return patch.object(TurboMLASparseImpl, "forward_mqa", attend)


@contextmanager
def changed(engine: dict[str, Any]) -> Iterator[None]:
    """Plants the defects of an engine of a job."""
    with ExitStack() as stack:
        if engine["zero_attention"]:
            stack.enter_context(zeroed_attention())
        if engine["nan_token"] is not None:
            stack.enter_context(nan_embedding(engine["nan_token"]))
        if engine["offset_segment"] is not None:
            stack.enter_context(short_offset_segments(engine["offset_segment"]))
        if engine["without_key_offset"]:
            stack.enter_context(without_key_offset())
        if engine["fixed_key_offset"]:
            stack.enter_context(fixed_key_offset())
        if engine["misled_drafter"]:
            stack.enter_context(misled_drafter())
        if engine["masked_attention"]:
            stack.enter_context(masked_attention())
        yield


def causal_images() -> Change:
    """Lets no token see a later one, also of the same image."""
    build = TurboMetadataBuilder.build

    def causal(
        builder: TurboMetadataBuilder,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TurboMetadata:
        common = replace(common_attn_metadata, mm_req_doc_ranges=None)
        return build(builder, common_prefix_len, common, fast_build)

    return patch.object(TurboMetadataBuilder, "build", causal)


def remake_key_offsets(worker: Any) -> None:
    """Gives each layer the offset of K that belongs to the bias it has now."""
    model = worker.model_runner.get_model()
    for layer, _ in key_bias.turbo_layers(model):
        delattr(layer, key_offset.BUFFER)
    key_bias.set_key_offsets(model)


def reloading(llm: LLM, model: str, remade: bool) -> Change:
    """Lets the engine load another model's weights before `RELOADING_STEP`.

    Args:
        llm: The engine, in this process.
        model: A model folder.
        remade: Whether the offset of K follows the weights: a defect.

    """
    schedule, steps = Scheduler.schedule, itertools.count()

    def watched_schedule(scheduler: Scheduler, *args: Any, **kwargs: Any) -> Any:
        if next(steps) == RELOADING_STEP:
            llm.collective_rpc("reload_weights", kwargs={"weights_path": model})
            if remade:
                llm.collective_rpc(remake_key_offsets)
        return schedule(scheduler, *args, **kwargs)

    return patch.object(Scheduler, "schedule", watched_schedule)
