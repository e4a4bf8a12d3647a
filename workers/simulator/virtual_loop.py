"""An event loop whose time is not the machine's: where it would wait, its clock goes on at once."""

import asyncio
import math
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")
SelectorEvents = list[tuple[selectors.SelectorKey, int]]


class SimulationStuck(RuntimeError):
    """Nothing will ever happen any more, and the run is not over."""


class VirtualSelector(selectors.DefaultSelector):
    """Moves its clock instead of waiting; no file is ever looked at."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> SelectorEvents:
        """Of ``selectors.BaseSelector``."""
        if timeout is None:
            raise SimulationStuck("everything waits, and nothing is going to happen")
        if timeout > 0:
            # A pause below what the clock can tell at such a time must not make the loop ask for ever.
            self.now_s = max(self.now_s + timeout, math.nextafter(self.now_s, math.inf))
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Begins at 0 s."""

    def __init__(self) -> None:
        self._virtual = VirtualSelector()
        super().__init__(self._virtual)

    def time(self) -> float:
        """Of ``asyncio.AbstractEventLoop``: virtual seconds."""
        return self._virtual.now_s


class LoopClock:
    """A ``Clock`` that tells the time of the running event loop."""

    def __init__(self) -> None:
        self._time = asyncio.get_running_loop().time

    def monotonic(self) -> float:
        return self._time()

    def wall(self) -> float:
        return self._time()


def run_virtual(main: Coroutine[Any, Any, ResultT]) -> ResultT:
    """The result of ``main``, in virtual time. Raises ``SimulationStuck``; not for use within an event loop."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
