# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which of the models of vLLM's recipes a turbo cache dtype serves."""
