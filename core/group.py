"""States of groups and batches, transitions of groups, reasons for discarding; normalisers and reward ranges."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Literal


class GroupState(StrEnum):
    """State of a group (docs/architecture.md has a diagram)."""

    OPEN = "open"
    READY = "ready"
    LEASED = "leased"
    ACKED = "acked"
    DISCARDED = "discarded"


class DiscardReason(StrEnum):
    """Why a group ended without being delivered."""

    TIMED_OUT = "timed_out"
    """A deadline passed before enough of its samples arrived."""
    INVALID = "invalid"
    """``is_valid_group`` found it finished but not valid."""
    FILTERED = "filtered"
    """Fewer items than the minimum remained after ``filter_item``."""
    INCOMPLETE = "incomplete"
    """Fewer rows than ``group_size`` remained after the last hook, on a slime route."""
    HOOK_FAILED = "hook_failed"
    """A user's hook raised, hung, died or returned an invalid result; the traceback is kept."""
    FAILED = "failed"
    """All of its samples failed."""
    UNREADABLE = "unreadable"
    """A stored body could not be read from the disk."""
    STALE = "stale"
    """Its samples come from weights older than ``max_staleness`` allows."""
    EVALUATED = "evaluated"
    """It belongs to an evaluation, whose result is stored."""


class BatchState(StrEnum):
    """State of a batch."""

    LEASED = "leased"
    """A trainer has it and has not acknowledged it."""
    ACKED = "acked"
    RELEASED = "released"
    """Released by the trainer, or by a server that could not send it completely."""
    EXPIRED = "expired"
    """Neither acknowledged nor extended in time. Both are still possible until another batch has its groups."""
    REVOKED = "revoked"
    """Undone by a rewind or a resume."""


TRANSITIONS: dict[GroupState, frozenset[GroupState]] = {
    GroupState.OPEN: frozenset({GroupState.READY, GroupState.DISCARDED}),
    # Acked without a lease: a trainer lists it in a resume, or acknowledges its batch late.
    GroupState.READY: frozenset({GroupState.LEASED, GroupState.DISCARDED, GroupState.ACKED}),
    # Ready again: released, expired, or lost by a trainer that resumes with a list.
    GroupState.LEASED: frozenset({GroupState.READY, GroupState.ACKED}),
    # A rewind to an earlier checkpoint, or a resume with an earlier list: the group must be delivered again.
    GroupState.ACKED: frozenset({GroupState.READY}),
    GroupState.DISCARDED: frozenset(),
}
"""Allowed target states for each state."""

# Not acked groups: their bodies are kept for a rewind, but only on disk.
LIVE = frozenset({GroupState.OPEN, GroupState.READY, GroupState.LEASED})
"""States in which a group's samples count against the buffer's limits."""


def check_transition(source: GroupState, target: GroupState) -> None:
    """Raise ``ValueError`` unless a group may move from ``source`` to ``target``."""
    if target not in TRANSITIONS[source]:
        raise ValueError(f"a group cannot move from {source} to {target}")


# Separate from a run's other settings: hook hosts need it, and pydantic would dominate their import time.
Normaliser = Literal["grpo", "rloo", "dr_grpo"]
"""Names of the formulas that turn rewards into advantages."""

RewardRange = tuple[float, float]
"""Lowest and highest reward that counts."""

SLIME_REWARD_RANGE: RewardRange = (0.0, 1.0)
"""slime's range: the default of a run started over its routes."""


def range_text(reward_range: Sequence[float] | None) -> str:
    """Format a reward range as text."""
    return "any finite number" if reward_range is None else f"[{reward_range[0]:g}, {reward_range[1]:g}]"
