# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The cases, the engine, the figures and the tables of `benchmarks/quality.py`."""
