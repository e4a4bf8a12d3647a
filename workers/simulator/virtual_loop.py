"""An event loop in virtual time: instead of waiting, it advances its clock at once."""

import asyncio
import math
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")
SelectorEvents = list[tuple[selectors.SelectorKey, int]]


class SimulationStuck(RuntimeError):
    """The run is not over, but no event can occur any more."""


class VirtualSelector(selectors.DefaultSelector):
    """Advances its clock instead of waiting. Never polls a file."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> SelectorEvents:
        """Advance the clock. Implements ``selectors.BaseSelector``."""
        if timeout is None:
            raise SimulationStuck("everything waits, and no event is scheduled")
        if timeout > 0:
            # A pause below the clock's resolution at this time must not make the loop poll forever.
            self.now_s = max(self.now_s + timeout, math.nextafter(self.now_s, math.inf))
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose virtual time begins at 0 s."""

    def __init__(self) -> None:
        self._virtual = VirtualSelector()
        super().__init__(self._virtual)

    def time(self) -> float:
        """Virtual seconds. Implements ``asyncio.AbstractEventLoop``."""
        return self._virtual.now_s


class LoopClock:
    """A ``Clock`` with the time of the running event loop."""

    def __init__(self) -> None:
        self._time = asyncio.get_running_loop().time

    def monotonic(self) -> float:
        return self._time()

    def wall(self) -> float:
        return self._time()


def run_virtual(main: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Run ``main`` in virtual time and return its result. Raises ``SimulationStuck``. Not for use in an event loop."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
