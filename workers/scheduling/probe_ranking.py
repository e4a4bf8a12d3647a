"""Ranks groups by the length of their probe, and computes the cap for rollouts of short groups."""

import math
from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

CAP_FACTOR = 1.5

Cap = int | Literal["cut", "own", "none"]


class Measured(NamedTuple):
    """Tokens and seconds of a probe."""

    tokens: float
    seconds: float


def top_of(probes: Sequence[float], share: float) -> list[int]:
    """Positions of the longest probes, longest first; equal ones in their order.

    Their number is ``share`` of all, rounded to the nearest integer.
    """
    by_length = sorted(range(len(probes)), key=lambda position: -probes[position])
    return by_length[: math.floor(share * len(probes) + 0.5)]


def cut_of(tokens: Sequence[float], top: Collection[int]) -> float | None:
    """Length of the longest probe outside ``top``; None if all are in it."""
    long = frozenset(top)
    return max((length for position, length in enumerate(tokens) if position not in long), default=None)


def cap_tokens(cap: Cap, cut: float | None, own: float | None) -> int | None:
    """Most tokens of a rollout on a fast engine for the setting ``cap``; None for no limit.

    ``own`` is the length of its group's probe; if unknown, ``cut`` replaces it.
    """
    if cap == "none":
        return None
    if not isinstance(cap, str):
        return cap
    length = own if cap == "own" and own is not None else cut
    return None if length is None else max(1, math.ceil(CAP_FACTOR * length))
