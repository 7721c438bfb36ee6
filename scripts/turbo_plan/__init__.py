# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What a model's weights and KV cache need of a GPU, for ``scripts/plan.py``."""
