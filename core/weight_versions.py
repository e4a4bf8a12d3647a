"""Weight versions: which policy produced a sample's tokens, and what becomes of calls while it changes."""

from typing import Literal

PauseMode = Literal["abort", "retract", "in_place"]
"""What becomes of calls in flight: ended with what they have; kept, and their cache computed anew; kept as they are."""

MAX_VERSION = (1 << 63) - 1


def oldest_version(*versions: object) -> int | None:
    """The least of the integers in ``versions`` and in the lists there; None if there is none.

    Engines also name versions by words, which have no order.
    """
    flat = [version for each in versions for version in (each if isinstance(each, list) else [each])]
    # The exact type: ``True`` is an int as well.
    return min((v for v in flat if type(v) is int and 0 <= v <= MAX_VERSION), default=None)
