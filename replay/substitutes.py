"""The rule of ``repeat``: which available number replaces a missing one."""

from collections.abc import Collection


def substitute(wanted: int, available: Collection[int]) -> int | None:
    """``wanted`` itself, else the largest smaller one, else the smallest larger one; None if nothing is available."""
    if wanted in available:
        return wanted
    smaller = [each for each in available if each < wanted]
    return max(smaller) if smaller else min(available, default=None)
