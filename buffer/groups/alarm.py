"""The alarm: nothing comes of a run, because its groups end undelivered, one after the other. Pure.

``alarm_after_groups`` in a row raise it, and the next group that does better ends it. ``deadlines`` looks at every tick
and logs it; ``/readyz``, the metrics and every view of the run show it, with the reasons of the groups.
"""

from collections import Counter
from collections.abc import Mapping

from forebay.core.group import GroupState


class AlarmCounts:
    """Counts, by reason, the groups that were discarded in a row.

    Groups that never got ready are counted until one does, and groups that were discarded although they were ready
    until one goes out: a run all of whose groups get stale delivers nothing either.
    """

    def __init__(self) -> None:
        self.num_in_a_row = 0
        """How many groups ended undelivered, one after the other."""
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
        # Kept as a number: the timer compares it several times a second, for every run.
        self.num_in_a_row = max(self._never_ready.total(), self._once_ready.total())

    def reasons(self, at_least: int) -> Mapping[str, int] | None:
        """Why, if ``at_least`` groups in a row ended undelivered."""
        if self.num_in_a_row < at_least:
            return None
        is_never = self._never_ready.total() == self.num_in_a_row
        return dict(self._never_ready if is_never else self._once_ready)


def alarm_text(reasons: Mapping[str, int]) -> str:
    """The alarm in words."""
    counts = ", ".join(f"{number} {reason}" for reason, number in sorted(reasons.items(), key=lambda item: -item[1]))
    return f"{sum(reasons.values())} groups in a row ended undelivered: {counts}"
