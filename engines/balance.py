"""Who is asked next: the least loaded of several servers, and those that failed last."""

import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Generic, TypeVar

from forebay.core.clock import Clock, SystemClock
from forebay.core.errors import EngineUnavailable

REST_FIRST_S = 0.5
REST_MAX_S = 30.0

T = TypeVar("T")
R = TypeVar("R")


class Member(Generic[T]):
    """One server of several: its calls in flight, and its rest after a failure."""

    def __init__(self, server: T, clock: Clock | None = None) -> None:
        self.server = server
        self.in_flight = 0
        self.answered = False
        """Its last call was answered."""
        self.last_asked_ns = 0
        self.failures = 0
        self._clock = clock or SystemClock()
        self._rests_until_s = 0.0

    @property
    def resting(self) -> bool:
        """It failed a short while ago and is asked only when nobody else is left."""
        return self._clock.monotonic() < self._rests_until_s

    def failed(self) -> None:
        """Start a rest, twice as long as the one before, up to 30 s."""
        self.answered = False
        # Many calls in flight at once fail for one reason: they count as one failure.
        if self.resting:
            return
        rest_s = min(REST_FIRST_S * 2**self.failures, REST_MAX_S)
        self.failures += 1
        self._rests_until_s = self._clock.monotonic() + rest_s

    def recovered(self) -> None:
        """Forget earlier failures: it has answered."""
        self.answered = True
        self.failures = 0
        self._rests_until_s = 0.0

    async def call(self, use: Callable[[T], Awaitable[R]]) -> R:
        """Run ``use`` on the server and note how it went."""
        self.in_flight += 1
        self.last_asked_ns = time.monotonic_ns()
        try:
            result = await use(self.server)
        except EngineUnavailable:
            self.failed()
            raise
        finally:
            self.in_flight -= 1
        self.recovered()
        return result


def least_loaded(members: Iterable[Member[T]]) -> Member[T]:
    """The member to ask next: not resting, fewest calls in flight, then the one not asked for longest."""
    return min(members, key=lambda member: (member.resting, member.in_flight, member.last_asked_ns))


async def ask_in_turn(members: Sequence[Member[T]], use: Callable[[T], Awaitable[R]]) -> R:
    """Run ``use`` on the least loaded member; on ``EngineUnavailable`` on the next, until one answers.

    Raises the last member's ``EngineUnavailable`` when none does. Any other error is the call's own and ends it.
    """
    left = list(members)
    last = EngineUnavailable("there is no engine to ask", hint="check the router's workers or the list of addresses")
    while left:
        member = least_loaded(left)
        left.remove(member)
        try:
            return await member.call(use)
        except EngineUnavailable as error:
            last = error
    raise last
