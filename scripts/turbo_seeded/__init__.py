# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Models, drafts and checkpoints with seeded weights, for tests and benchmarks."""
