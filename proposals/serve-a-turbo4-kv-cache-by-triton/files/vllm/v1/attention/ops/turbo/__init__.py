# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The KV cache dtype turbo4: rotated, block-scaled keys and values of four bits.

``format`` is the byte contract. ``triton`` has the kernels that store, decode and
gather. Words that are used throughout:

* tile: 16 tokens of a (block, KV head); plane: the bytes of one kind in a tile.
* unit: 8 codes that are packed together.
* scale group: 16 rotated coordinates that share a scale.
* split: a share of a sequence; partial result: its output and log-sum-exp.
"""
