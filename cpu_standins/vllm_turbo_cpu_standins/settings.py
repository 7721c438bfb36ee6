# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The settings of a process that runs vLLM with the stand-ins."""

from typing import Any, Literal

Runner = Literal["v1", "v2"]

# There is no native custom op to enable, and nothing to compile for.
ENGINE_ARGS: dict[str, Any] = {
    "enforce_eager": True,
    "compilation_config": {"custom_ops": ["none"]},
}
SERVE_ARGS = ("--enforce-eager", "--compilation-config", '{"custom_ops": ["none"]}')


def engine_environment(runner: Runner = "v1") -> dict[str, str]:
    """Returns the environment variables of an engine's process.

    Args:
        runner: "v1" is vLLM's choice where Triton has no driver. "v2", the runner for
            GPUs, needs Triton. Its interpreter is enough, and vLLM accepts that only
            if the list of visible devices is empty.

    """
    variables = {
        "VLLM_TARGET_DEVICE": "cpu",
        # A few helpers of samplers are compiled at their first use, which takes longer
        # than a test.
        "TORCH_COMPILE_DISABLE": "1",
    }
    if runner == "v2":
        return variables | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    # A list that is not empty but has no device, in place of the caller's.
    return variables | {"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": "-1"}
