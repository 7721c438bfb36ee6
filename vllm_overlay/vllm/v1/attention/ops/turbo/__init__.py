# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Turbo KV cache: rotated, block-scaled 3 and 4 bit keys and values.

``format`` is the byte contract, ``interface`` the types and entry points of all sets of
kernels, ``runtime`` a layer's forward pass. ``planning`` runs on the host. ``triton``,
``cuda`` and ``reference`` (PyTorch) compute the same. Words that are used throughout:

* tile: 16 tokens of a (block, KV head); plane: the bytes of one kind in a tile.
* unit: 8 codes that are packed together.
* scale group: 16 rotated coordinates that share a scale; part: the coordinates of a
  group that one of several lanes has in a store.
* T, R, B: query tokens, requests of a batch, sequences of one call of a kernel.
* decode: a request with one query token and its drafts. Extend: a request with a few
  more, which also reads packed pages. Prefill: any other request, for FlashAttention.
* raw tokens: query tokens that are attended to as computed (``turbo_prefill`` raw), not
  as they are stored (``turbo_prefill`` stored).
* tail: the newest cached tokens of a request, also in 8 bits; for users the recent
  window.
* split: a share of a sequence; partial result: its output and LSE, before the merge.
* row: a query token and head.
* query slot: room for a query token; each request of a call has as many as the longest.
* slice: query tokens of a prefill that attend at a time; piece: cached tokens that are
  dequantised at a time.
* offset segment: tokens that share an offset of K.
"""
