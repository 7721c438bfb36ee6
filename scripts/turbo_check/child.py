# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Runs the cases of `check_model.py` on one engine, in a process of its own.

Usage: python child.py JOB FOLDER. The folder gets records of each text's distributions
(`probe.Record`), decoded and in prefill, `result.json`, and `stages`, a line for each
finished part.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.outputs import RequestOutput

# The packages beside this one.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from turbo_process.arm import write_result  # noqa: E402
from turbo_quality.child import Lab  # noqa: E402

from turbo_check.prefill import prefill_params, save_prefill  # noqa: E402
from turbo_check.probe import WATCH, start_watching, stop_watching  # noqa: E402

POLL_S = 0.2


def record_path(folder: Path, index: int, part: str = "text") -> Path:
    """Returns where the record of a text is, or of its prefill."""
    return folder / f"{part}-{index}.npz"


class Check(Lab):
    """One engine, and its cases."""

    def __init__(self, job: dict[str, Any], folder: Path) -> None:
        self.folder = folder
        self.job = job
        start = time.perf_counter()
        super().__init__(job)
        self.done("start", start)

    def done(self, stage: str, start: float) -> None:
        self.timed(stage, start)
        with (self.folder / "stages").open("a") as stages:
            print(stage, file=stages)

    def keys(self) -> dict[str, dict[str, list[float]]]:
        """Returns statistics of a prompt's K and V, by layer, of all ranks' heads."""
        self.llm.apply_model(start_watching)
        self.continue_greedily([self.job["keys"]], [1], True)
        found: dict[str, dict[str, list[float]]] = {}
        for rank in self.llm.apply_model(stop_watching):
            for layer, statistics in rank.items():
                of_layer = found.setdefault(layer, {name: [] for name in statistics})
                for name, heads in statistics.items():
                    of_layer[name] += heads
        return found

    def await_reference(self, stage: str) -> None:
        """Waits for a stage of the reference, which may still run beside this one.

        If the reference fails, the process that started both ends this one.
        """
        if self.job["reference"]:
            stages = Path(self.job["reference"]) / "stages"
            while not stages.exists() or stage not in stages.read_text().split():
                time.sleep(POLL_S)

    def replay(self, index: int, text: list[int]) -> SamplingParams:
        """Returns parameters that replay and record a text's end, token by token."""
        steps, reference = self.job["decode_steps"], self.job["reference"]
        watch = {
            "path": str(record_path(self.folder, index)),
            "first": len(text) - steps - 1,
            "count": min(self.job["top"], self.vocab_size),
            "reference": reference and str(record_path(Path(reference), index)),
        }
        return SamplingParams(
            temperature=0.0,
            max_tokens=steps,
            ignore_eos=True,
            detokenize=False,
            trace_decode_token_ids=text[-steps:],
            extra_args={WATCH: watch},
        )

    def record(self) -> list[RequestOutput]:
        """Records the distributions of each text's end, decoded token by token."""
        texts = [text["tokens"] for text in self.job["texts"]]
        steps = self.job["decode_steps"]
        params = [self.replay(*numbered) for numbered in enumerate(texts)]
        outputs = self.generate([text[:-steps] for text in texts], params)
        for output, text in zip(outputs, texts, strict=True):
            assert list(output.outputs[0].token_ids) == text[-steps:]
        return outputs

    def record_prefill(self) -> None:
        """Records the distributions of texts whose chunks read the cache."""
        job, reference = self.job, self.job["reference"]
        first, texts = job["prefill_from"], job["texts"]
        chosen = [
            (
                # An engine generates a token, for which the context has room.
                texts[index]["tokens"][:-1],
                record_path(self.folder, index, "prefill"),
                reference and record_path(Path(reference), index, "prefill"),
            )
            for index in job["prefilled"]
        ]
        count = min(job["top"], self.vocab_size)
        prompts = [tokens for tokens, *_ in chosen]
        params = [prefill_params(x, first, count, other) for x, _, other in chosen]
        outputs = self.generate(prompts, params) if chosen else []
        for output, (_, path, other) in zip(outputs, chosen, strict=True):
            save_prefill(output, first, path, other)

    def run(self) -> dict[str, Any]:
        """Returns all results except the records."""
        job = self.job
        start = time.perf_counter()
        keys = self.keys()
        self.done("keys", start)

        self.await_reference("decode")
        start = time.perf_counter()
        self.record()
        self.done("decode", start)

        self.await_reference("prefill")
        start = time.perf_counter()
        self.record_prefill()
        self.done("prefill", start)

        start = time.perf_counter()
        prompts = job["continued"]
        steps = [job["greedy_steps"]] * len(prompts)
        continuations = self.continue_greedily(prompts, steps, True)
        self.done("greedy", start)

        start = time.perf_counter()
        prompts = [needle["prompt"] for needle in job["needles"]]
        steps = [job["answer_tokens"]] * len(prompts)
        answers = self.continue_greedily(prompts, steps, False)
        self.done("needles", start)
        texts = {"continuations": continuations, "answers": answers}
        return texts | {"keys": keys} | self.facts()


def main() -> None:
    job_path, folder = map(Path, sys.argv[1:])
    job = json.loads(job_path.read_text())
    write_result(folder, Check(job, folder).run())


if __name__ == "__main__":
    main()
