# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The ways to store K and V that means.py compares."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

SEGMENTS = (64, 128, 256, 512, 1024, 2048)
# Tokens at the start of a sequence that are left alone, or kept apart.
FIRSTS = (1, 16, 64)


@dataclass(frozen=True)
class Arm:
    """A way to store K and V.

    Attributes:
        key: The part of K that is taken off: ``none``, ``exact``, ``constant``, or the
            length of segments.
        share: The part of K's mean that is taken off, beside the whole bias of K. The
            first token's own mean is taken off whole.
        across: The directions that errors of K lie across, ``mean`` and ``queries``,
            beside the key's own: see ``across``.
        across_segment: The length of segments over which the queries' direction is
            averaged when RoPE has turned it; 0: it is exact at each position.
        value: Whether V's mean is taken off.
        first: The first token whose K has its mean taken off.
        first_value: The first token whose V has its mean taken off.
        own_first: The sides whose first token has a mean of its own taken off.
        kept: Tokens at the start that are kept apart.
        kept_bits: Bits of a coordinate of these: 32, or 8 as in a recent window.
        kept_sides: The sides that are kept so, ``K``, ``V`` or ``KV``.
        source: The tokens that the means are of.

    """

    key: str = "none"
    share: float = 1.0
    across: tuple[str, ...] = ()
    across_segment: int = 0
    value: bool = False
    first: int = 16
    first_value: int = 16
    own_first: str = ""
    kept: int = 0
    kept_bits: int = 32
    kept_sides: str = "KV"
    source: str = "text"

    @property
    def name(self) -> str:
        of_key = f"segments of {self.key}" if self.key.isdigit() else self.key
        sides = [] if self.key == "none" else [f"K ({of_key})"]
        sides += ["V"] if self.value else []
        words = [" and ".join(sides) or "nothing"]
        if self.share != 1:
            words.append(f"{self.share:g} of K's mean")
        if self.across:
            exact = self.across_segment == 0 or "queries" not in self.across
            form = "" if exact else f" (segments of {self.across_segment})"
            words.append(f"errors across {' and '.join(self.across)}{form}")
        if self.first != 16:
            words.append(f"K's from token {self.first} on")
        if self.first_value != 16:
            words.append(f"V's from token {self.first_value} on")
        if self.own_first:
            words.append(f"{self.own_first} of the first token by its own mean")
        if self.kept:
            form = "exact" if self.kept_bits == 32 else f"in {self.kept_bits} bits"
            sides_kept = "" if self.kept_sides == "KV" else f" of {self.kept_sides}"
            words.append(f"the first {self.kept}{sides_kept} {form}")
        if self.source != "text":
            words.append(f"means of {self.source}")
        return ", ".join(words)


KEY = Arm("2048")
BOTH = replace(KEY, value=True)
SERVED = Arm("2048", first=1, own_first="K")


def served(
    shares: list[float], sets: list[tuple[str, ...]], segments: list[int]
) -> list[Arm]:
    """Arms as served, but for the part of K's mean, and what errors lie across."""
    found = [
        replace(SERVED, share=share, across=names, across_segment=segment)
        for share, names, segment in product(shares, sets, segments)
    ]
    # Segments are of queries' directions alone.
    return [
        x for x in found if "queries" in x.across or x.across_segment == segments[0]
    ]


def kept_apart(arm: Arm, count: int, bits: int = 8) -> Arm:
    """An arm with the first tokens kept apart."""
    return replace(arm, first=count, first_value=count, kept=count, kept_bits=bits)


# The arms that decide.
MAIN = [
    *(Arm(), KEY, Arm("exact"), Arm(value=True), BOTH),
    *(kept_apart(each, count) for each, count in product((KEY, BOTH), FIRSTS)),
    Arm(kept=64, kept_bits=8),
    *(
        Arm(segment, first=1, first_value=1, own_first=sides)
        for segment, sides in product(("256", KEY.key), ("K", "V", "KV"))
    ),
]


def arms(sources: list[str]) -> Iterator[Arm]:
    """Every arm; ``text`` is in ``sources``."""
    yield from MAIN
    yield from (Arm(str(x)) for x in SEGMENTS if str(x) != KEY.key)
    yield Arm("constant")
    yield replace(BOTH, first=0, first_value=0)
    for first in FIRSTS:
        if first != KEY.first:
            yield replace(KEY, first=first)
            yield replace(BOTH, first=first, first_value=first)
        yield replace(BOTH, first=first, first_value=0)
        yield kept_apart(KEY, first, bits=32)
        yield kept_apart(BOTH, first, bits=32)
    yield Arm(kept=16)
    for side in "KV":
        yield replace(kept_apart(KEY, 64), kept_sides=side)
    for source in sources:
        if source != "text":
            yield replace(KEY, source=source)
            yield replace(BOTH, source=source)
