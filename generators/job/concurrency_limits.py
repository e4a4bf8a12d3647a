"""``num_process: "auto"``: as many rollouts at each engine as it works on at once, found out while they run."""

import asyncio
import logging
from collections.abc import Callable

from forebay.core.scheduling.engine_loads import EngineLoads
from forebay.engines.abc import EngineLoad
from forebay.generators.job.ports import JobEngines

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5
SHRINK = 0.7


class ConcurrencyLimit:
    """The places of one engine: one more while nothing waits there, 0.7 times as many when something does. Pure."""

    def __init__(self, first: int) -> None:
        self.num_places = first

    def note(self, load: EngineLoad, in_flight: int, *, is_full: bool) -> None:
        """``load`` is what the engine says of itself, ``in_flight`` how many of our rollouts are there.

        ``is_full``: others would start if there were more places; else the engine's queue tells nothing about them.
        """
        if load.waiting == 0:
            self.num_places += is_full
        elif in_flight <= self.num_places:  # else it has not yet come down to what it was shrunk to
            self.num_places = max(1, int(SHRINK * self.num_places))


async def adjust_places(pool: JobEngines, loads: EngineLoads, on_more: Callable[[], None]) -> None:
    """Ask each engine of a run now and then, for as long as the run lasts; ``on_more``: there may be more places.

    Each begins with as many as the run has at first, and an engine that does not tell what waits there keeps them.
    """
    first = loads.num_places
    engines: dict[str, ConcurrencyLimit] = {}
    silent: set[str] = set()
    while True:
        urls = await pool.when_up()
        answers = await asyncio.gather(*(pool.load_at(url) for url in urls))
        is_full = loads.total >= loads.num_places
        for url, load in zip(urls, answers, strict=True):
            places = engines.setdefault(url, ConcurrencyLimit(first))
            if load is not None:
                places.note(load, loads.in_flight(url), is_full=is_full or loads.in_flight(url) >= places.num_places)
            elif url not in silent:
                silent.add(url)
                logger.warning("%s does not say what waits there: it has %d places", url, places.num_places)
        loads.limit({url: engines[url].num_places for url in urls})
        on_more()
        await asyncio.sleep(LOOK_EVERY_S)
