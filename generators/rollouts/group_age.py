"""Age of a group: its timeout and deadline count by the run's clock, and only while a rollout is in flight."""

from forebay.core.clock import ActiveClock


class GroupAge:
    """Age of a group, stopped while none of its rollouts is in flight. ``counted_s`` is the age to start with."""

    def __init__(self, clock: ActiveClock, timeout_s: float, deadline_s: float, counted_s: float = 0.0) -> None:
        self._clock = clock
        self._timeout_s = timeout_s
        self._deadline_s = deadline_s
        self._ends_s = deadline_s
        self._counted_s = counted_s
        self._since_s = 0.0
        self._num_in_flight = 0

    @property
    def is_stopped(self) -> bool:
        """Whether no rollout is in flight."""
        return not self._num_in_flight

    def now_s(self) -> float:
        """Seconds counted so far."""
        return self._counted_s + (self._clock.now_s() - self._since_s if self._num_in_flight else 0.0)

    def left_s(self) -> float:
        """Counted seconds until the timeout or the deadline, whichever is first."""
        return max(0.0, self._ends_s - self.now_s())

    def deadline_left_s(self) -> float:
        """Counted seconds until the deadline, which no sample extends."""
        return max(0.0, self._deadline_s - self.now_s())

    def note_sample(self) -> None:
        """Restart the timeout, within the deadline."""
        self._ends_s = min(self._deadline_s, self.now_s() + self._timeout_s)

    def enter(self) -> None:
        """Note that one more rollout is in flight."""
        if not self._num_in_flight:
            self._since_s = self._clock.now_s()
        self._num_in_flight += 1

    def leave(self) -> None:
        """Note that a rollout is no longer in flight."""
        counted_s = self.now_s()
        self._num_in_flight -= 1
        if not self._num_in_flight:
            self._counted_s = counted_s
