"""``kill -9`` of ``forebay engine record`` under concurrent calls, again and again over one file."""

import asyncio
import os
import random
import signal
from collections import Counter, defaultdict
from pathlib import Path

import httpx
import pytest

from forebay.engines.scripted import Reply, ScriptedEngine
from forebay.replay import RecordedEngine, Recording
from forebay.replay.recording import RecordedCall
from tests.kit import poll_until
from tests.replay.engine.calls_kit import LIMIT_S, chat, engine_command, rid

pytestmark = pytest.mark.soak

ROUNDS = int(os.environ.get("ROUNDS", "6"))
"""By hand, `make test-soak ROUNDS=50`."""
NUM_CALLERS = 12
"""Every third of them asks for streams."""
NUM_BEFORE = 60


class Callers:
    """Who asks the recorder of one round, each for its own slot, until nobody answers any more.

    All ask the same; only the ``rid``, which does not count, tells one call from another.
    """

    def __init__(self, url: str, number: int) -> None:
        self.asked: dict[int, list[str]] = {slot: [] for slot in range(NUM_CALLERS)}
        self.given: dict[str, str] = {}
        """By ``rid``, whole answers."""
        self._url, self._number = url, number
        self._news = asyncio.Condition()
        self._tasks = [asyncio.create_task(self._ask_on(slot)) for slot in self.asked]

    async def wait_for(self, num_more: int) -> None:
        """Return after so many more answers."""
        wanted = len(self.given) + num_more
        async with asyncio.timeout(LIMIT_S), self._news:
            await self._news.wait_for(lambda: len(self.given) >= wanted)

    async def end(self) -> None:
        """Return when each has found out that nobody answers."""
        await asyncio.gather(*self._tasks)

    async def _ask_on(self, slot: int) -> None:
        while True:
            name = rid(slot, attempt=self._number % 256, call=len(self.asked[slot]))
            self.asked[slot].append(name)
            try:
                body = await chat(self._url, slot, is_stream=slot % 3 == 0, rid=name)
            except httpx.TransportError:
                return
            async with self._news:
                self.given[name] = body
                self._news.notify_all()


def calls_of(file: Path) -> list[RecordedCall]:
    with Recording.open(file) as recording:
        return [call for call in recording.calls() if call.request.method == "POST"]


def names_of(file: Path) -> list[str]:
    return [call.request.rid for call in calls_of(file)]


async def record_until_killed(file: Path, engine_url: str, number: int, chance: random.Random) -> Callers:
    """A round. What was found in the file before the kill is in it afterwards, and a beginning of what followed."""
    async with engine_command("record", file, "--upstream", engine_url) as (url, process):
        callers = Callers(url, number)
        await callers.wait_for(NUM_BEFORE)
        answered = set(callers.given)
        await asyncio.to_thread(poll_until, lambda: answered <= set(names_of(file)), LIMIT_S)
        await callers.wait_for(chance.randrange(40))
        process.kill()
        await callers.end()
        await process.wait()
    names = names_of(file)
    assert answered <= set(names)
    for asked in callers.asked.values():
        kept = [name in names for name in asked]
        assert kept == sorted(kept, reverse=True)
    return callers


def check(file: Path, given: dict[str, str], asked: set[str]) -> None:
    """Nothing is in the file but answers as they were given, each once, with its own request."""
    calls = calls_of(file)
    names = Counter(call.request.rid for call in calls)
    assert set(names.values()) == {1}
    assert names.keys() <= asked
    for call in calls:
        body = call.reply.body.decode()
        # Of what was in flight the caller may have seen nothing; the answer names its request all the same.
        assert call.reply.is_whole
        assert body == given.get(call.request.rid, body)
        assert f'"id":"{call.request.rid}"' in body


@pytest.mark.timeout(180 + 60 * ROUNDS)
async def test_a_killed_recorder_loses_doubles_and_mixes_nothing(tmp_path: Path) -> None:
    file, chance = tmp_path / "calls.fbr", random.Random(ROUNDS)
    given: dict[str, str] = {}
    asked: set[str] = set()
    async with ScriptedEngine(
        lambda call: Reply(text=f"answer {call.number} to it", tokens_per_s=chance.choice([None, 500, 1_000]))
    ) as engine:
        for number in range(ROUNDS):
            before = names_of(file) if number else []
            callers = await record_until_killed(file, engine.url, number, chance)
            given |= callers.given
            asked.update(*callers.asked.values())
            assert names_of(file)[: len(before)] == before
            await asyncio.to_thread(check, file, given, asked)
        async with engine_command("record", file, "--upstream", engine.url) as (url, process):
            last = await chat(url, 1)
            process.send_signal(signal.SIGTERM)
            await process.communicate()
            assert process.returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["calls.fbr"]
    await replay_all(file, last)


async def replay_all(file: Path, last: str) -> None:
    """Each slot gets its own answers, of every round, in the order in which they were asked."""
    recorded = defaultdict(list)
    for call in calls_of(file):
        recorded[int(call.request.lane[-4:], 16)].append(call.reply.body.decode())
    assert recorded[1][-1] == last

    async def ask_all(url: str, slot: int) -> list[str]:
        return [await chat(url, slot, is_stream=slot % 3 == 0) for _ in recorded[slot]]

    async with RecordedEngine(file) as engine:
        answers = await asyncio.gather(*(ask_all(engine.url, slot) for slot in recorded))
    assert answers == [*recorded.values()]
