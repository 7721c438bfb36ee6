# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Finds the models of vLLM's recipes that a turbo cache dtype serves."""
