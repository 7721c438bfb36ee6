# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Scores one engine on GSM8K with lm_eval, in a process of its own.

Usage: python gsm8k.py JOB FOLDER. The settings are those of vLLM's own tests
(tests/evals, tests/quantization): five examples, generated answers.
"""

import json
import sys
from pathlib import Path

import lm_eval

# The packages beside this one.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from turbo_process.arm import write_result  # noqa: E402

TASK = "gsm8k"
NUM_FEWSHOT = 5
METRIC = "exact_match"
FILTER = "strict-match"


def main() -> None:
    job_path, folder = map(Path, sys.argv[1:])
    job = json.loads(job_path.read_text())
    results = lm_eval.simple_evaluate(
        model="vllm",
        model_args={"pretrained": job["model"], **job["engine_args"]},
        tasks=[TASK],
        num_fewshot=NUM_FEWSHOT,
        batch_size="auto",
        limit=job["limit"],
    )["results"][TASK]
    score, stderr = (
        results[f"{name},{FILTER}"] for name in (METRIC, f"{METRIC}_stderr")
    )
    write_result(folder, {"score": score, "stderr": stderr})


if __name__ == "__main__":
    main()
