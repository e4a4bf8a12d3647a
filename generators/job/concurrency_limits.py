"""``num_process`` "auto" and "spare": adjusts the rollouts at each engine to what it runs without queueing."""

import asyncio
import logging
from collections.abc import Callable

from forebay.core.scheduling.engine_loads import EngineLoads
from forebay.engines.abc import EngineLoad
from forebay.generators.job.ports import JobEngines

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5
SHRINK = 0.7
YIELD = 0.0
"""Used instead by "spare": the calls of other runs, which wait in the queue, go first."""


class ConcurrencyLimit:
    """Slots of one engine: one more while its queue is empty, ``shrink`` times as many while it is not. No I/O."""

    def __init__(self, first: int, shrink: float = SHRINK) -> None:
        self.num_places, self._shrink = first, shrink

    def note(self, load: EngineLoad, in_flight: int, *, is_full: bool) -> None:
        """Adjust the slots to the engine's reported ``load``, with ``in_flight`` of our rollouts on the engine.

        ``is_full`` says that more slots would be used at once. Otherwise, an empty queue does not justify more slots.
        """
        if load.waiting == 0:
            self.num_places += is_full
        elif in_flight <= self.num_places:  # else the last reduction has not taken effect yet
            self.num_places = max(1, int(self._shrink * self.num_places))


async def adjust_places(
    pool: JobEngines, loads: EngineLoads, on_more: Callable[[], None], shrink: float = SHRINK
) -> None:
    """Poll each engine's load and adjust its slots for as long as the run lasts. Calls ``on_more`` after each poll.

    Each engine starts with the run's initial number. An engine that does not report its queue keeps that number.
    """
    first = loads.num_places
    engines: dict[str, ConcurrencyLimit] = {}
    silent: set[str] = set()
    while True:
        urls = await pool.when_up()
        answers = await asyncio.gather(*(pool.load_at(url) for url in urls))
        is_full = loads.total >= loads.num_places
        for url, load in zip(urls, answers, strict=True):
            places = engines.setdefault(url, ConcurrencyLimit(first, shrink))
            if load is not None:
                places.note(load, loads.in_flight(url), is_full=is_full or loads.in_flight(url) >= places.num_places)
            elif url not in silent:
                silent.add(url)
                logger.warning("%s does not report its queue: it keeps %d slots", url, places.num_places)
        loads.limit({url: engines[url].num_places for url in urls})
        on_more()
        await asyncio.sleep(LOOK_EVERY_S)
