"""As many rollouts at once as the engines work on, found out while they run."""

import asyncio
from typing import Any

import pytest

from forebay.core.errors import InvalidInput
from forebay.core.scheduling.engine_loads import EngineLoads
from forebay.engines.abc import EngineLoad
from forebay.engines.scripted import Reply, ScriptedEngine
from forebay.generators.base import BaseGenerator, single_turn
from forebay.generators.job.concurrency_limits import YIELD, ConcurrencyLimit, adjust_places
from tests.generators.bench_kit import reward

LIMIT_S = 120.0
SLOW = Reply(text="1", delay_s=0.7)


def test_an_engine_gets_one_place_more_while_nothing_waits_and_three_tenths_less_when_something_does() -> None:
    places = ConcurrencyLimit(16)
    places.note(EngineLoad(running=16), 16, is_full=True)
    assert places.num_places == 17
    places.note(EngineLoad(running=3), 3, is_full=False)
    assert places.num_places == 17, "nobody wanted those that are there"
    places.note(EngineLoad(running=16, waiting=1), 17, is_full=True)
    assert places.num_places == 11
    places.note(EngineLoad(running=16, waiting=1), 17, is_full=True)
    assert places.num_places == 11, "what was taken away is still running"
    places.note(EngineLoad(running=8, waiting=3), 11, is_full=True)
    assert places.num_places == 7


def test_an_engine_keeps_a_place() -> None:
    places = ConcurrencyLimit(1)
    places.note(EngineLoad(waiting=5), 0, is_full=True)
    assert places.num_places == 1


def test_spare_places_are_left_to_others_at_once() -> None:
    places = ConcurrencyLimit(16, YIELD)
    places.note(EngineLoad(running=16, waiting=1), 16, is_full=True)
    assert places.num_places == 1
    places.note(EngineLoad(running=5), 1, is_full=True)
    assert places.num_places == 2


@pytest.mark.usefixtures("with_and_without_workers")
async def test_engines_are_filled_up_to_where_calls_begin_to_wait(buffer, write_rows) -> None:
    """Of two engines the one that takes 40 at once gets more than the first 16, the one that takes 4 gets fewer."""
    buffer.plan["group_size"] = 4
    async with (
        ScriptedEngine(lambda _: SLOW, max_running=4) as small,
        ScriptedEngine(lambda _: SLOW, max_running=40) as large,
        asyncio.timeout(LIMIT_S),
    ):
        rows = write_rows(*({"prompt": f"row {number}"} for number in range(300)))
        generator = BaseGenerator([small.url, large.url], buffer.url, 4, num_process="auto")
        running = asyncio.create_task(generator.run_async(rows, single_turn, reward))
        while not (large.in_flight >= 20 and 0 < small.in_flight <= 5):
            assert not running.done()
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


class SilentPool:
    """Engines that are no SGLang."""

    async def when_up(self) -> list[str]:
        return ["http://silent"]

    async def load_at(self, url: str) -> None:
        assert url == "http://silent"


async def test_an_engine_that_says_nothing_of_its_queue_keeps_the_first_number(caplog) -> None:
    loads, looks = EngineLoads(16, ["http://silent"]), asyncio.Semaphore(0)
    pool: Any = SilentPool()
    adjusting = asyncio.create_task(adjust_places(pool, loads, looks.release))
    async with asyncio.timeout(LIMIT_S):
        await looks.acquire()
        await looks.acquire()
    adjusting.cancel()
    assert (loads.num_places, loads.places("http://silent")) == (16, 16)
    assert [record.message for record in caplog.records if "http://silent" in record.message] == [
        "http://silent does not report its queue: it keeps 16 slots"
    ]


@pytest.mark.parametrize("given", ["automatic", "-3", 0])
def test_other_words_than_auto_are_refused(given: str) -> None:
    with pytest.raises(InvalidInput, match="num_process"):
        BaseGenerator("http://127.0.0.1:9", "http://127.0.0.1:9", num_process=given)
