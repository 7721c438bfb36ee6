# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Triton's interpreter as the stand-ins quicken it: bits and errors stay."""

import json
import os
import subprocess
import sys
from pathlib import Path

CHILD = Path(__file__).with_name("interpreter_child.py")


def test_results_and_errors_are_tritons(tmp_path: Path):
    result = tmp_path / "result.json"
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, CHILD, result], env=environment, check=True)
    found = json.loads(result.read_text())
    assert found["quick"] == found["again"] == found["plain"]
    errors = {name for name, text in found["plain"].items() if "Error: " in text}
    assert errors == {"unlike_shapes", "no_power_of_two", "unlike_ranks"}
