"""What the buffer is told of groups without a rollout in flight, so that it does not let them age meanwhile."""

import asyncio
from collections.abc import Callable, Sequence

from forebay.generators.buffer_link.abc import GroupKey
from forebay.generators.rollouts.open_group import OpenGroup

LASTING_S = 0.1
"""A rollout often follows the one before at once: what changes back within this time is not told."""
REPEAT_S = 60.0
"""The buffer trusts a process of which it hears: with groups that it has told idle, it reports at least so often."""


class IdleReports:
    """Compares how groups are with what was told of them. ``on_due`` is called when there is something to tell.

    What was announced is busy for the buffer, until it is told otherwise.
    """

    def __init__(self, on_due: Callable[[], object]) -> None:
        self._on_due = on_due
        self._reported: set[GroupKey] = set()
        """The groups that are idle for the buffer."""
        self._new: dict[GroupKey, OpenGroup] = {}
        self._lasting: dict[GroupKey, OpenGroup] = {}
        """Those that changed before the timer was set: they are looked at when it rings."""
        self._due: dict[GroupKey, OpenGroup] = {}
        self._is_timed = False

    @property
    def repeat_s(self) -> float | None:
        """How long nothing may be reported; None for ever."""
        return REPEAT_S if self._reported else None

    def note_announced(self, key: GroupKey) -> None:
        """The buffer takes a group for busy."""
        self._reported.discard(key)

    def note_announced_idle(self, key: GroupKey) -> None:
        """The buffer takes a group for idle, of which nothing runs here."""
        self._reported.add(key)
        self._on_due()  # from now on something is to be told from time to time

    def note(self, group: OpenGroup) -> None:
        """A group has opened, or has another state perhaps; of the same key the last one counts."""
        key = group.key
        for noted in (self._due, self._lasting):
            if key in noted:
                noted[key] = group
                return
        self._new[key] = group
        if not self._is_timed:
            self._set_timer()

    def _set_timer(self) -> None:
        self._is_timed = True
        asyncio.get_running_loop().call_later(LASTING_S, self._look)

    def _look(self) -> None:
        self._due |= {key: group for key, group in self._lasting.items() if self._differs(key, group)}
        self._lasting, self._new, self._is_timed = self._new, {}, False
        if self._lasting:
            self._set_timer()
        if self._due:
            self._on_due()

    def take(self) -> tuple[Sequence[GroupKey], Sequence[GroupKey]]:
        """What is to be told now, and counts as told: the groups that are idle, and those that are not any more."""
        changed = [(key, group.is_idle) for key, group in self._due.items() if self._differs(key, group)]
        self._due.clear()
        idle, busy = ([key for key, is_idle in changed if is_idle is wanted] for wanted in (True, False))
        self._reported.update(idle)
        self._reported.difference_update(busy)
        return idle, busy

    def _differs(self, key: GroupKey, group: OpenGroup) -> bool:
        return group.is_idle != (key in self._reported)
