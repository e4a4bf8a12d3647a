"""What becomes of a recorded group: as its recording says, or as a rehearsal finds it."""

import msgspec

from forebay.core.records.rows import GroupRow

DELIVERED, DISCARDED, OPEN = "delivered", "discarded", "open"
SALVAGED = "salvaged"

OF_READY = frozenset({"filtered", "incomplete", "hook_failed", "stale", "unreadable"})
"""Reasons for which a group is discarded that was ready already: those before are decided without a reader."""


class GroupVerdict(msgspec.Struct, frozen=True, gc=False):
    """Whether a group goes to the trainer. One that is ready, leased or acknowledged counts as delivered."""

    state: str
    """``delivered``, ``discarded`` or ``open``."""
    reason: str = ""
    """Why it was discarded; ``salvaged`` of one that was delivered because its time was up."""

    def __str__(self) -> str:
        return f"{self.state}: {self.reason}" if self.reason else self.state


class SampleOutcome(msgspec.Struct, frozen=True, gc=False):
    """What a sample is worth."""

    uid: str
    reward: float | None
    """None: it failed."""
    advantage: float | None = None
    """The sum of what its rows say as their reward after the hooks; None: no row of it goes out."""


class GroupOutcome(msgspec.Struct, frozen=True):
    """What a rehearsal made of a group."""

    verdict: GroupVerdict
    detail: str
    """What the buffer says of it beside the reason; a traceback where a hook failed."""
    samples: list[SampleOutcome]
    """Those that the group has, in the order in which they came."""


def recorded_verdict(group: GroupRow) -> GroupVerdict:
    """The verdict that a recording has."""
    if group.state in (DISCARDED, OPEN):
        return GroupVerdict(group.state, group.reason)
    return GroupVerdict(DELIVERED, SALVAGED if group.is_salvaged else "")


def is_undecided(group: GroupRow, found: GroupVerdict) -> bool:
    """Whether the recording ends before the hooks had said what a rehearsal ``found``.

    They had not been asked about an open group; nor had those been that filter and normalise a ready one.
    """
    return group.state == OPEN or (group.state == "ready" and found.state == DISCARDED and found.reason in OF_READY)
