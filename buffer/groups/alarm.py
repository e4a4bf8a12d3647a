"""Noticing that nothing comes of a run: groups that end undelivered, one after the other. Pure."""

from collections import Counter
from collections.abc import Mapping

from forebay.core.group import GroupState


class Fruitless:
    """Counts, by reason, the groups that were discarded in a row.

    Groups that never got ready are counted until one does, and groups that were discarded although they were ready
    until one goes out: a run all of whose groups get stale delivers nothing either.
    """

    def __init__(self) -> None:
        self._never_ready: Counter[str] = Counter()
        self._once_ready: Counter[str] = Counter()

    def note(self, source: GroupState, target: GroupState, reason: str) -> None:
        """A group went from one state to another."""
        if target is GroupState.DISCARDED:
            (self._never_ready if source is GroupState.OPEN else self._once_ready)[reason] += 1
        elif target is GroupState.READY:
            self._never_ready.clear()
        elif target is GroupState.LEASED:
            self._once_ready.clear()

    def reasons(self, at_least: int) -> Mapping[str, int] | None:
        """Why, if ``at_least`` groups in a row ended undelivered."""
        worse = max(self._never_ready, self._once_ready, key=Counter.total)
        return dict(worse) if worse.total() >= at_least else None


def alarm_text(reasons: Mapping[str, int]) -> str:
    """The alarm in words."""
    counts = ", ".join(f"{number} {reason}" for reason, number in sorted(reasons.items(), key=lambda item: -item[1]))
    return f"{sum(reasons.values())} groups in a row ended undelivered: {counts}"
