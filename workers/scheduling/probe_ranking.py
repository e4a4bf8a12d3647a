"""What one probe of each group says: which groups are long, and what the rollouts of the others may sample."""

import math
from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

CAP_FACTOR = 1.5

Cap = int | Literal["cut", "own", "none"]


class Measured(NamedTuple):
    """What a probe took."""

    tokens: float
    seconds: float


def top_of(probes: Sequence[float], share: float) -> list[int]:
    """The positions of the longest probes, longest first; of equal ones those that came first.

    They are ``share`` of all, rounded to the nearest number of groups.
    """
    by_length = sorted(range(len(probes)), key=lambda position: -probes[position])
    return by_length[: math.floor(share * len(probes) + 0.5)]


def cut_of(tokens: Sequence[float], top: Collection[int]) -> float | None:
    """The length of the longest probe whose position is not in ``top``; None if all are."""
    long = frozenset(top)
    return max((length for position, length in enumerate(tokens) if position not in long), default=None)


def cap_tokens(cap: Cap, cut: float | None, own: float | None) -> int | None:
    """What a rollout may sample off the heavy engines, for a setting ``cap``; None if anything.

    ``own`` is the length of its group's probe: where that is not known, the one at the cut stands for it.
    """
    if cap == "none":
        return None
    if not isinstance(cap, str):
        return cap
    length = own if cap == "own" and own is not None else cut
    return None if length is None else max(1, math.ceil(CAP_FACTOR * length))
