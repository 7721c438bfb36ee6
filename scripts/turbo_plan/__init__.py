# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The memory and time that a model and its KV cache need, for ``scripts/plan.py``."""
