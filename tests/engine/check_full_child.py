# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The child of turbo_check, which also writes whole distributions.

They go into `full.npy` and `full-prefill.npy` (text, position, token). The result of a
job with `only_keys` is statistics of K, and nothing else.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import numpy as np  # noqa: E402
from turbo_check.child import Check  # noqa: E402
from turbo_process.arm import write_result  # noqa: E402
from turbo_quality.child import as_array  # noqa: E402

from vllm import SamplingParams  # noqa: E402
from vllm.outputs import RequestOutput  # noqa: E402


class FullCheck(Check):
    def replay(self, index: int, text: list[int]) -> SamplingParams:
        params = super().replay(index, text)
        params.logprobs = -1
        params.flat_logprobs = True
        return params

    def record(self) -> list[RequestOutput]:
        outputs = super().record()
        full = [as_array(output, self.vocab_size) for output in outputs]
        np.save(self.folder / "full.npy", np.stack(full))
        return outputs

    def record_prefill(self) -> None:
        super().record_prefill()
        chosen = [self.job["texts"][index] for index in self.job["prefilled"]]
        if chosen:
            full = self.prefill([text["tokens"][:-1] for text in chosen])
            np.save(self.folder / "full-prefill.npy", full)


def main() -> None:
    job_path, folder = map(Path, sys.argv[1:])
    job = json.loads(job_path.read_text())
    check = FullCheck(job, folder)
    write_result(folder, check.keys() if job.get("only_keys") else check.run())


if __name__ == "__main__":
    main()
