"""The states of groups and batches, a group's transitions and reasons to be discarded; normalisers, reward ranges."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Literal


class GroupState(StrEnum):
    """Where a group is in its life (docs/architecture.md draws it)."""

    OPEN = "open"
    READY = "ready"
    LEASED = "leased"
    ACKED = "acked"
    DISCARDED = "discarded"


class DiscardReason(StrEnum):
    """Why a group ended without being delivered."""

    TIMED_OUT = "timed_out"
    """A deadline passed and too few of its samples were there."""
    INVALID = "invalid"
    """``is_valid_group`` found it finished and not valid."""
    FILTERED = "filtered"
    """Fewer items than the minimum were left after ``filter_item``."""
    INCOMPLETE = "incomplete"
    """Fewer rows than ``group_size`` were left after the last hook, on a slime route."""
    HOOK_FAILED = "hook_failed"
    """A user's hook raised, hung, died or answered nonsense; the traceback is kept."""
    FAILED = "failed"
    """Every sample of it failed."""
    UNREADABLE = "unreadable"
    """A stored body could not be read back from the disk."""
    STALE = "stale"
    """Its samples are of weights that are older than ``max_staleness`` allows."""


class BatchState(StrEnum):
    """Where a batch is."""

    LEASED = "leased"
    """With a trainer, which has not acknowledged it."""
    ACKED = "acked"
    RELEASED = "released"
    """Given back by the trainer, or by a server that could not send it whole."""
    EXPIRED = "expired"
    """Neither acknowledged nor extended in time. It still can be, until its groups are with another batch."""
    REVOKED = "revoked"
    """Undone by a rewind or a resume."""


TRANSITIONS: dict[GroupState, frozenset[GroupState]] = {
    GroupState.OPEN: frozenset({GroupState.READY, GroupState.DISCARDED}),
    # Acked without a lease: a trainer lists it in a resume, or acknowledges its batch late.
    GroupState.READY: frozenset({GroupState.LEASED, GroupState.DISCARDED, GroupState.ACKED}),
    # Ready again: given back, expired, or lost by a trainer that has come back with a list.
    GroupState.LEASED: frozenset({GroupState.READY, GroupState.ACKED}),
    # A rewind to an earlier checkpoint, or a resume with an earlier list: what was trained on since is wanted again.
    GroupState.ACKED: frozenset({GroupState.READY}),
    GroupState.DISCARDED: frozenset(),
}
"""From each state, where a group may go."""

# Not the acked ones: their bodies are kept for a rewind, but on the disk alone.
LIVE = frozenset({GroupState.OPEN, GroupState.READY, GroupState.LEASED})
"""The states in which a group's samples count against the buffer's limits."""


def check_transition(source: GroupState, target: GroupState) -> None:
    """Raise ``ValueError`` unless a group may go from ``source`` to ``target``."""
    if target not in TRANSITIONS[source]:
        raise ValueError(f"a group cannot go from {source} to {target}")


# Not with the other settings of a run: hook hosts need it, and pydantic would be most of what they load.
Normaliser = Literal["grpo", "rloo", "dr_grpo"]
"""The formulas that make advantages of rewards, by name."""

RewardRange = tuple[float, float]
"""The least and the greatest reward that counts."""

SLIME_REWARD_RANGE: RewardRange = (0.0, 1.0)
"""slime's, which a run has that was started over its routes and says nothing else."""


def range_text(reward_range: Sequence[float] | None) -> str:
    """A range of rewards in words."""
    return "any finite number" if reward_range is None else f"[{reward_range[0]:g}, {reward_range[1]:g}]"
