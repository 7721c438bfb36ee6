# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Turbo KV cache: rotated, block-scaled 3 and 4 bit keys and values.

``format`` is the byte contract, ``interface`` what sets of kernels have in common,
``layer.runner`` what a layer's forward pass does. ``planning`` is on the host,
``triton``, ``cuda`` and ``reference`` (PyTorch) compute the same. Words that are used
throughout:

* tile: 16 tokens of a (block, KV head); plane: the bytes of one kind in a tile.
* unit: 8 codes that are packed together.
* scale group: 16 rotated coordinates that share a scale; part: those of a group that
  one of several lanes has, in a store.
* T, R, B: query tokens, requests of a batch, sequences of one call of a kernel.
* decode: a request with one query token and its drafts. Extend: one with a few more,
  which reads packed pages, too. Prefill: any other, for FlashAttention.
* newest tokens: query tokens that are attended to as computed (``turbo_prefill`` raw),
  not as they are stored (stored).
* split: a share of a sequence; partial: its output and LSE, before the merge. Row: a
  query token and head.
* slice: query tokens that a prefill attends from at a time; piece: cached tokens that
  are dequantised at a time. Offset segment: tokens that share an offset of K.
"""
