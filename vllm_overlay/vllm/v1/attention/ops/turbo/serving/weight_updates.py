# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Updates the offset of K (see ``key_offset``) after later loads of weights.

Engines for reinforcement learning start with dummy weights. They load weights before
the first request, and new ones with each update, without telling this module. So the
biases of K are compared before the first step after a time without requests, when the
device has nothing else to do.
"""

import time
from weakref import WeakKeyDictionary

import torch

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.logger import init_logger
from vllm.v1.attention.ops.turbo.keys import offset as key_offset
from vllm.v1.attention.ops.turbo.keys.bias import (
    LONGEST_KEY_BIAS,
    KeyBias,
    warn_of_lagging_positions,
    warn_of_long_biases,
)
from vllm.v1.attention.ops.turbo.serving.startup import turbo_impls
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.worker_base import WorkerBase

logger = init_logger(__name__)

# Seconds between steps of running requests after which biases are also compared. A step
# seldom takes as long, and loading weights takes longer.
PAUSE_S = 0.25

# Messages: why an offset is not updated, or the consequence, and the way out.
WHILE_REQUESTS_RUN = (
    "requests are running whose keys were stored with it. It follows when none runs: "
    "before weights are loaded let requests end, or pause with clear_cache"
)
WITH_A_CONNECTOR = (
    "a KV connector was told at the start what its blocks follow from. Start the "
    "engine with the weights (--load-format auto), or without --kv-transfer-config"
)
STALE_BLOCKS = (
    "Weights were loaded whose bias of K is up to %.0f apart from the previous one, "
    "and requests found blocks of the previous weights in the prefix cache. Call "
    "reset_prefix_cache after weights are loaded, whatever the cache dtype."
)
LOST_BIASES = (
    "Turbo KV cache: a bias of K that the model had at the start is not found any "
    "more. The offset of K stays. If answers suffer, restart the engine."
)


class WeightUpdates:
    """Updates the offsets of K on this rank to the weights, between requests.

    Attributes:
        layers: The biases from which offsets follow.

    Args:
        vllm_config: The configuration of an engine whose weights are loaded.

    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.vllm_config = vllm_config
        self.impls = turbo_impls(vllm_config)
        biases = (impl.runner.key_bias for impl in self.impls)
        self.layers: list[KeyBias] = [x for x in biases if x and x.is_legible]
        self.running: set[str] = set()
        self.last_step_s = time.monotonic()
        self.made_of = self.seen = self._flat([x.loaded for x in self.layers])

    @staticmethod
    def _flat(biases: list[torch.Tensor]) -> torch.Tensor:
        """All biases in one fp32 vector on the CPU, by a copy that waits for the
        device.
        """
        if not biases:
            return torch.empty(0)
        device = biases[0].device
        row = torch.cat([bias.to(device).flatten() for bias in biases])
        return row.to("cpu", torch.float32)

    def before_step(self, step: SchedulerOutput) -> None:
        """Check for loaded weights when it costs nothing, and update offsets to them.

        Args:
            step: The step that the model is about to run.

        """
        if not self.layers:
            return
        now_s = time.monotonic()
        has_paused = now_s - self.last_step_s > PAUSE_S
        self.last_step_s = now_s
        self.running -= step.finished_req_ids
        self.running -= step.preempted_req_ids or set()
        is_idle = not self.running
        self.running.update(request.req_id for request in step.scheduled_new_reqs)
        self.running |= step.scheduled_cached_reqs.resumed_req_ids
        if step.total_num_scheduled_tokens == 0:
            return
        were_reloaded = any(layer.was_reloaded for layer in self.layers)
        if is_idle or has_paused or were_reloaded:
            hits = any(x.num_computed_tokens > 0 for x in step.scheduled_new_reqs)
            self._look(is_idle, hits)

    def _look(self, is_idle: bool, has_prefix_hits: bool) -> None:
        """Compare the biases with those that offsets were computed from."""
        for layer in self.layers:
            layer.was_reloaded = False
        biases = [bias for x in self.layers if (bias := x.read()) is not None]
        if len(biases) < len(self.layers):
            logger.warning_once(LOST_BIASES)
            return
        row = self._flat(biases)
        # With a NaN all outputs are NaN, and no offset helps.
        if not row.isfinite().all():
            return
        if torch.equal(row, self.made_of):
            return
        parts = row.split([x.loaded.numel() for x in self.layers])
        now = [part.view_as(x.loaded) for part, x in zip(parts, self.layers)]
        apart = max(
            (bias - x.loaded).norm(dim=-1).max().item()
            for bias, x in zip(now, self.layers)
        )
        is_long = apart > LONGEST_KEY_BIAS
        has_connector = self.vllm_config.kv_transfer_config is not None
        if is_idle and not has_connector:
            self._follow(now)
            self.made_of = row
            if is_long and has_prefix_hits:
                logger.warning(STALE_BLOCKS, apart)
        elif is_long and not torch.equal(row, self.seen):
            logger.warning(
                "Weights were loaded whose bias of K is up to %.0f apart from the one "
                "that the offset of K is made of. Beyond %.0f a turbo KV cache stores "
                "keys so badly that answers suffer. The offset stays, because %s.",
                apart,
                LONGEST_KEY_BIAS,
                WITH_A_CONNECTOR if has_connector else WHILE_REQUESTS_RUN,
            )
        self.seen = row

    def _follow(self, biases: list[torch.Tensor]) -> None:
        """Update offsets to biases, one for each layer."""
        without = {}
        for bias, layer in zip(biases, self.layers):
            layer.set_offset(bias)
            if layer.table is None:
                without[layer.layer.layer_name] = bias.norm(dim=-1).max().item()
        offsets = [impl.runner.scoring.key_offset for impl in self.impls]
        logger.info(
            "KV cache %s: the offset of K follows the weights that were loaded, in %d "
            "of %d layers (%s).",
            self.impls[0].kv_cache_dtype,
            sum(offset is not None for offset in offsets),
            len(offsets),
            key_offset.digest(offsets),
        )
        with set_current_vllm_config(self.vllm_config):
            warn_of_long_biases(without, self.vllm_config.model_config.architecture)
            warn_of_lagging_positions(self.layers)


_UPDATES: WeakKeyDictionary[WorkerBase, WeightUpdates] = WeakKeyDictionary()


def follow_weights(worker: WorkerBase, step: SchedulerOutput) -> None:
    """Update the offsets of K to weights that were loaded since the last step.

    Args:
        worker: A worker with a loaded model that is about to run a step.
        step: The scheduler's output.

    """
    updates = _UPDATES.get(worker)
    if updates is None:
        updates = _UPDATES[worker] = WeightUpdates(worker.vllm_config)
    updates.before_step(step)
