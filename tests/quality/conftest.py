# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
import sys
from pathlib import Path

# The modules beside this one and the lab's, whatever pytest's import mode.
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "lab")]
