# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Runs many requests in a cache that is too small: aborts, refusals and preemptions.

The trained model is first asked for facts one request at a time. Then requests of the
same prompts come in random order, more than the cache has room for. Some are aborted at
any time, before their first token or between two, and some are impossible. The
scheduler begins a prompt as soon as a part of it has room, so requests take each
other's blocks all the time. The checks at the end are:

* Every request was answered, aborted or refused, and has as many tokens as asked for.
* Answers equal those of the quiet run up to the first position where its two likeliest
  tokens are no more than equality.TIE apart. Tokens behind an answer only keep requests
  running.
* Requests were preempted. While some waited, 99 % of the blocks were taken on average.
* With `--window`, `--drafts`, `--offload` and `--transfers`, requests had a recent
  window, drafts were accepted, pages came back from the host's memory, and transfers
  between engines failed.
* All blocks are free again, and the device's memory has not grown.

It prints one JSON object, and ends with status 1 if a check fails.
"""

import argparse
import random
import sys
import time
from pathlib import Path
from typing import Any

from common import Report
from env import has_gpu
from soak_common import build_parser as common_parser
from soak_common import common_faults, decided_tokens, make_prompts
from soak_transfers import (
    LEASE_S,
    Transfer,
    for_nobody,
    from_nobody,
    transfer_config,
    unanswered_port,
)
from turbo_equality.modes import DRAFTING
from turbo_equality.run import soaked_cache, window_lengths
from turbo_process.log import emit
from turbo_process.runner import engine_variables, exit_when_told, run_for_row
from turbo_quality.cases import HEAD
from vllm_turbo_cpu_standins.settings import ENGINE_ARGS

# Tokens of a prompt's chunk; small chunks leave less of the cache unused.
PART = 128
# Seconds of the engine's start, before its time counts.
START_S = 600
# The least mean share of taken blocks, in steps that leave requests waiting.
LEAST_USAGE = 0.99


class Soak:
    """An engine, the prompts, and the counts so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        from vllm import LLM

        self.args = args
        self.random = random.Random(args.seed)
        self.prompts = make_prompts(args, (0.0, 0.25, 0.5, 0.75, 1.0))
        longest = max(map(len, self.prompts))
        self.max_model_len = longest + args.tokens
        # So many of the longest requests just fit.
        cache = soaked_cache(args)
        blocks = -(-self.max_model_len // cache["block_size"]) + args.window
        blocks = args.longest_at_once * blocks + 1
        options: dict[str, Any] = dict(ENGINE_ARGS) if args.on_cpu else {}
        options["kv_transfer_config"] = transfer_config(
            args.transfers, args.offload, args.on_cpu
        )
        if args.drafts:
            options["speculative_config"] = DRAFTING[args.drafts].speculative_config
        self.llm = LLM(
            str(args.model),
            dtype="float32" if args.on_cpu else "bfloat16",
            **cache,
            num_gpu_blocks_override=blocks,
            max_model_len=self.max_model_len,
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            long_prefill_token_threshold=PART,
            scheduler_reserve_full_isl=False,
            enable_prefix_caching=True,
            gpu_memory_utilization=args.gpu_memory_utilization,
            max_logprobs=2,
            hf_overrides=HEAD,
            disable_log_stats=False,
            **options,
        )
        self.engine = self.llm.llm_engine
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.counts = dict.fromkeys(
            ("answered", "aborted", "aborted_streams", "refused", "accepted_impossible")
            + ("unequal", "for_nobody", "from_nobody", "aborted_transfers"),
            0,
        )
        self.counts["positions"] = 0
        self.unequal: list[dict[str, Any]] = []
        self.waiting: dict[str, int] = {}
        self.streaming: set[str] = set()
        self.transfers: dict[str, Transfer] = {}
        self.listener, self.port = unanswered_port()
        self.usages: list[float] = []
        self.schedule = self.scheduler.schedule
        self.scheduler.schedule = self.watched_schedule

    def watched_schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Notes the cache's usage in a step that leaves requests waiting."""
        output = self.schedule(*args, **kwargs)
        if len(self.scheduler.waiting) > 0:
            self.usages.append(self.scheduler.kv_cache_manager.usage)
        return output

    def params(
        self, logprobs: int | None = None, transfer: Transfer | None = None
    ) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            temperature=0.0,
            max_tokens=transfer and transfer.tokens or self.args.tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=logprobs,
            extra_args=transfer and {"kv_transfer_params": transfer.params},
        )

    def transfer_of(self, number: int, prompt: list[int]) -> Transfer | None:
        """Returns the transfer of a request, if it has one."""
        if self.random.random() >= self.args.transfers:
            return None
        if self.random.random() < 0.5:
            return for_nobody()
        groups = len(self.scheduler.kv_cache_config.kv_cache_groups)
        blocks = -(-len(prompt) // self.scheduler.block_size)
        return from_nobody(number, blocks, groups, self.port)

    def run_quietly(self) -> None:
        """Asks each prompt alone, and notes the tokens that no rounding decides."""
        self.quiet: list[list[int]] = []
        for prompt in self.prompts:
            self.llm.reset_prefix_cache()
            (output,) = self.llm.generate(
                {"prompt_token_ids": prompt}, self.params(2), use_tqdm=False
            )
            answer = output.outputs[0]
            likeliest = ([p.logprob for p in x.values()] for x in answer.logprobs)
            self.quiet.append(decided_tokens(answer.token_ids, likeliest))
        self.llm.reset_prefix_cache()

    def add(self, number: int) -> None:
        """Adds a request; an impossible one has to be refused."""
        from vllm.exceptions import VLLMValidationError

        name, index = str(number), self.random.randrange(len(self.prompts))
        prompt = self.prompts[index]
        impossible = self.random.random() < self.args.impossible
        if impossible:
            too_long = prompt * (1 + self.max_model_len // len(prompt))
            prompt = self.random.choice([[], too_long])
        transfer = None if impossible else self.transfer_of(number, prompt)
        params = self.params(transfer=transfer)
        try:
            self.engine.add_request(name, {"prompt_token_ids": prompt}, params)
        except VLLMValidationError:
            assert impossible, f"a prompt of {len(prompt)} tokens was refused"
            self.counts["refused"] += 1
            return
        self.counts["accepted_impossible"] += impossible
        self.waiting[name] = index
        if transfer:
            self.transfers[name] = transfer
            self.counts[transfer.kind] += 1

    def step(self) -> None:
        for output in self.engine.step():
            if not output.finished:
                self.streaming.add(output.request_id)
                continue
            index = self.waiting.pop(output.request_id)
            self.streaming.discard(output.request_id)
            transfer = self.transfers.pop(output.request_id, None)
            wanted = transfer and transfer.tokens or self.args.tokens
            tokens = list(output.outputs[0].token_ids)
            decided = self.quiet[index][:wanted]
            self.counts["answered"] += len(tokens) == wanted
            self.counts["positions"] += len(decided)
            if tokens[: len(decided)] != decided:
                self.counts["unequal"] += 1
                self.unequal.append({"prompt": index, "tokens": tokens})
        if self.waiting and self.random.random() < self.args.aborted:
            name = self.random.choice(list(self.waiting))
            self.engine.abort_request([name])
            del self.waiting[name]
            self.counts["aborted"] += 1
            self.counts["aborted_streams"] += name in self.streaming
            self.counts["aborted_transfers"] += name in self.transfers
            self.streaming.discard(name)
            self.transfers.pop(name, None)

    def run(self) -> dict[str, Any]:
        """Runs all requests, and returns the counts."""
        self.run_quietly()
        # This runs all shapes that take memory.
        copies = -(-self.args.at_once // len(self.prompts))
        self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in self.prompts * copies],
            self.params(),
            use_tqdm=False,
        )
        self.llm.reset_prefix_cache()
        free, reserved = self.pool.get_num_free_blocks(), self.reserved_bytes()
        preempted, start = self.preemptions(), time.perf_counter()
        self.usages.clear()
        added = 0
        while added < self.args.requests or self.waiting:
            while added < self.args.requests and len(self.waiting) < self.args.at_once:
                self.add(added)
                added += 1
            self.step()
            if time.perf_counter() - start > self.args.time_limit:
                break
        seconds = time.perf_counter() - start
        self.wait_for_leases(free)
        return self.counts | {
            "requests": added,
            "unanswered": len(self.waiting),
            "first_unequal": self.unequal[:3],
            "preemptions": self.preemptions() - preempted,
            "mean_usage": sum(self.usages) / max(len(self.usages), 1),
            "highest_usage": max(self.usages, default=0.0),
            "steps_with_waiting": len(self.usages),
            "blocks": self.pool.num_gpu_blocks,
            "blocks_lost": free - self.pool.get_num_free_blocks(),
            "reserved_bytes_grown": self.reserved_bytes() - reserved,
            "accepted_drafts": self.metric("vllm:spec_decode_num_accepted_tokens"),
            "loaded_bytes": self.metric("vllm:kv_offload_load_bytes"),
            "seconds": seconds,
        }

    def wait_for_leases(self, free: int) -> None:
        """Steps until no page waits to be fetched, or a few leases have ended."""
        deadline = time.perf_counter() + 5 * LEASE_S * bool(self.args.transfers)
        while self.pool.get_num_free_blocks() < free:
            if time.perf_counter() > deadline:
                break
            self.engine.step()
            time.sleep(0.01)

    def preemptions(self) -> int:
        return self.metric("vllm:num_preemptions")

    def metric(self, name: str) -> int:
        metrics = self.llm.get_metrics()
        return sum(int(m.value) for m in metrics if m.name == name)

    def reserved_bytes(self) -> int:
        import torch

        return 0 if self.args.on_cpu else torch.cuda.memory_reserved()


def complaints(row: dict[str, Any]) -> list[str]:
    """Returns the faults of a row."""
    ended = row["answered"] + row["aborted"] + row["refused"]
    checks = {
        f"{row['requests'] - ended} requests got nothing": ended != row["requests"],
        **common_faults(row),
        "an impossible request was taken": row["accepted_impossible"] > 0,
        "nothing was aborted or refused": not row["aborted"] or not row["refused"],
        "no stream was cancelled": row["aborted_streams"] == 0,
        "no request was preempted": row["preemptions"] == 0,
        f"{row['mean_usage']:.3f} of the blocks were taken, not {LEAST_USAGE:g}": (
            row["mean_usage"] < LEAST_USAGE
        ),
        "no draft was accepted": row["drafts"] and not row["accepted_drafts"],
        "no page came back from the host": row["offload"] and not row["loaded_bytes"],
        "no transfer went wrong, or none was aborted": row["transfers"]
        and not (row["for_nobody"] and row["from_nobody"] and row["aborted_transfers"]),
        f"{row['blocks_lost']} blocks are lost": row["blocks_lost"] != 0,
        "the device's memory grew": row["reserved_bytes_grown"] > 0,
    }
    return [text for text, wrong in checks.items() if wrong]


def build_parser() -> argparse.ArgumentParser:
    parser = common_parser(__doc__, cases=4, max_num_seqs=256)
    parser.add_argument(
        "--transfers", type=float, default=0.0, help="share of requests, which fail"
    )
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--at-once", type=int, default=256, help="waiting or running")
    parser.add_argument(
        "--longest-at-once", type=int, default=32, help="requests that the cache holds"
    )
    # So many tokens that a step fills all blocks that the one before has freed.
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument(
        "--aborted", type=float, default=0.03, help="share of steps that abort one"
    )
    parser.add_argument(
        "--impossible", type=float, default=0.01, help="share of impossible requests"
    )
    parser.add_argument("--time-limit", type=float, default=3600, help="seconds")
    parser.add_argument("--log", type=Path, default=Path("/tmp/turbo-soak.log"))
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser


def main() -> int:
    args = build_parser().parse_args()
    args.on_cpu = not has_gpu()
    args.lengths = args.lengths or [512, 600, 777, 1024, 1500, 2048]
    if args.child:
        emit(**Soak(args).run())
        return 0
    exit_when_told()
    report = Report(args.output)
    kinds = ("kv_cache_dtype", "window", "drafts", "offload", "transfers")
    row = {kind: getattr(args, kind) for kind in kinds} | run_for_row(
        [sys.executable, __file__, *sys.argv[1:], "--child"],
        args.log,
        # The checks need the scheduler in the engine's process.
        engine_variables(args.on_cpu) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        START_S + 2 * args.time_limit,
    )
    row["recent_window"] = sorted(window_lengths(args.log))
    if "wrong" not in row:
        row["wrong"] = complaints(row)
    report.row(**row)
    return 1 if row["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
