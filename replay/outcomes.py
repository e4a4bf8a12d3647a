"""The outcome of a recorded group, as recorded or as a rehearsal finds it."""

import msgspec

from forebay.core.records.rows import GroupRow

DELIVERED, DISCARDED, OPEN = "delivered", "discarded", "open"
SALVAGED = "salvaged"

OF_READY = frozenset({"filtered", "incomplete", "hook_failed", "stale", "unreadable"})
"""Reasons for discarding a group that was already ready. All other reasons are decided without a reader."""


class GroupVerdict(msgspec.Struct, frozen=True, gc=False):
    """Whether a group goes to the trainer. A ready, leased or acknowledged group counts as delivered."""

    state: str
    """``delivered``, ``discarded`` or ``open``."""
    reason: str = ""
    """Why it was discarded; ``salvaged`` if it was delivered because it timed out."""

    def __str__(self) -> str:
        return f"{self.state}: {self.reason}" if self.reason else self.state


class SampleOutcome(msgspec.Struct, frozen=True, gc=False):
    """Reward and advantage of a sample."""

    uid: str
    reward: float | None
    """None if the sample failed."""
    advantage: float | None = None
    """The sum of its rows' rewards after the hooks; None if no row is delivered."""


class GroupOutcome(msgspec.Struct, frozen=True):
    """The result of rehearsing a group."""

    verdict: GroupVerdict
    detail: str
    """The buffer's explanation beyond the reason; a traceback if a hook failed."""
    samples: list[SampleOutcome]
    """The group's samples, in order of arrival."""


def recorded_verdict(group: GroupRow) -> GroupVerdict:
    """The verdict in the recording."""
    if group.state in (DISCARDED, OPEN):
        return GroupVerdict(group.state, group.reason)
    return GroupVerdict(DELIVERED, SALVAGED if group.is_salvaged else "")


def is_undecided(group: GroupRow, found: GroupVerdict) -> bool:
    """Whether the recording ends before the hooks could decide what a rehearsal ``found``.

    For an open group no hook had run; for a ready one, filter and normalise had not.
    """
    return group.state == OPEN or (group.state == "ready" and found.state == DISCARDED and found.reason in OF_READY)
