"""A run's own time, which stands still while its deadlines must not count."""

from forebay.core.clock import Clock


class ActiveClock:
    """Counts seconds while it is running, from what was counted before."""

    def __init__(self, clock: Clock, counted_s: float = 0.0) -> None:
        self._clock = clock
        self._counted_s = counted_s
        self._since_s: float | None = None

    @property
    def is_running(self) -> bool:
        return self._since_s is not None

    def now_s(self) -> float:
        """Active seconds counted so far."""
        if self._since_s is None:
            return self._counted_s
        return self._counted_s + self._clock.monotonic() - self._since_s

    def run(self, is_running: bool) -> None:
        """Let it count, or let it stand still."""
        if is_running and self._since_s is None:
            self._since_s = self._clock.monotonic()
        elif not is_running:
            self._counted_s = self.now_s()
            self._since_s = None
