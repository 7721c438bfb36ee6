# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The means of K, or of MLA's latents, in a model's layers.

They are measured on a short text.

K has a mean over positions also in models without a bias of K, and a code of few bits
has better uses for its levels. The model runs once, on raw K and V: the text, and
several sequences of one token each. RoPE turns each key by its position, so keys are
turned back before they are averaged.

The first token of a sequence is an attention sink, whose key is far from the others'.
So it is left out, and the sequences of one token give its mean. Latents have no RoPE,
and those of first tokens lose the same mean as others.
"""

from typing import NamedTuple

import torch

from vllm.v1.attention.ops.turbo.keys import offset as key_offset

# The version of the text and of the rule below: a new rule changes the bytes of pages.
VERSION = 3
# Tokens of the text: the most, and the fewest that give means.
MAX_TOKENS, MIN_TOKENS = 1024, 320
# Sequences of one token, whose keys give the mean of first tokens.
FIRST_TOKENS = 64


class LayerMeans(NamedTuple):
    """The means of a layer's keys, fp32 on the CPU.

    Latents are the keys of one head. Their two means are equal.

    Attributes:
        first: (H, D), of first tokens' keys as attention has them.
        rest: (H, D), of other tokens' keys before RoPE.
        length: (H,), the root of the other keys' mean square length.
        direction: (H, D), the direction of queries: see ``keys.directions``. It is zero
            for latents.

    """

    first: torch.Tensor
    rest: torch.Tensor
    length: torch.Tensor
    direction: torch.Tensor

    @property
    def share(self) -> float:
        """The length of the mean as a share of the keys' length, over all heads."""
        square = self.rest.square().sum() / self.length.square().sum()
        return square.sqrt().item()

    @property
    def is_usable(self) -> bool:
        """Whether all values are finite, and some key is not zero."""
        is_finite = all(bool(x.isfinite().all()) for x in self)
        return is_finite and bool((self.length > 0).any())

    def heads(self, part: slice) -> "LayerMeans":
        """The means of some heads."""
        return LayerMeans(*(x[part].contiguous() for x in self))

    def table(self, rotary: key_offset.Rotary | None) -> torch.Tensor:
        """The offset that follows from the means: see ``KeyOffset.table``.

        Args:
            rotary: The rotation of K, from ``key_offset.mean_rotary``; None for none.

        Returns:
            (G, H, D) fp32 on the CPU, with two rows if K is not rotated.

        """
        rows = key_offset.mean_rotated(self.rest, rotary)
        if rotary is None:
            rows = rows.repeat(2, 1, 1)
        rows[0] = self.first
        return rows


# Means by the name of the attention layer.
Means = dict[str, LayerMeans]


def first_tokens(vocab_size: int) -> list[int]:
    """Different tokens, spread over a vocabulary."""
    count = min(FIRST_TOKENS, vocab_size)
    return [index * vocab_size // count for index in range(count)]
