# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Turbo KV cache: rotated, block-scaled 3 and 4 bit keys and values.

``format`` is the byte contract, ``rotation`` the randomised Hadamard
transform, ``reference`` both of them and attention in PyTorch; ``triton_*``
are the portable kernels.
"""
