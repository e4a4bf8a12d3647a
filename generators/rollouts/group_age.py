"""How old a group is: both of its limits count by the run's clock, and only while one of its rollouts is in flight."""

from forebay.core.clock import ActiveClock


class GroupAge:
    """Stands still while none of the group's rollouts is in flight. ``counted_s`` is what was counted before."""

    def __init__(self, clock: ActiveClock, timeout_s: float, deadline_s: float, counted_s: float = 0.0) -> None:
        self._clock = clock
        self._timeout_s = timeout_s
        self._deadline_s = deadline_s
        self._ends_s = deadline_s
        self._counted_s = counted_s
        self._since_s = 0.0
        self._num_in_flight = 0

    @property
    def stands_still(self) -> bool:
        """Whether no rollout is in flight."""
        return not self._num_in_flight

    def now_s(self) -> float:
        """Seconds counted so far."""
        return self._counted_s + (self._clock.now_s() - self._since_s if self._num_in_flight else 0.0)

    def left_s(self) -> float:
        """Seconds, as they are counted, until one of the limits is reached."""
        return max(0.0, self._ends_s - self.now_s())

    def deadline_left_s(self) -> float:
        """Until the later limit, which no sample moves."""
        return max(0.0, self._deadline_s - self.now_s())

    def note_sample(self) -> None:
        """The time after a sample begins again, within the deadline."""
        self._ends_s = min(self._deadline_s, self.now_s() + self._timeout_s)

    def enter(self) -> None:
        """A rollout is in flight."""
        if not self._num_in_flight:
            self._since_s = self._clock.now_s()
        self._num_in_flight += 1

    def leave(self) -> None:
        """One is not any more."""
        counted_s = self.now_s()
        self._num_in_flight -= 1
        if not self._num_in_flight:
            self._counted_s = counted_s
