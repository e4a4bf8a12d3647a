"""Runs that are being fed, and what that keeps of their sources."""

from pathlib import Path

from forebay.buffer.store.memory import MemoryStore
from forebay.core.run import RunState
from forebay.core.settings import Settings
from forebay.server.runs.input_files import InputFiles
from forebay.server.runs.replay_sources import ReplaySources
from forebay.server.runs.replays import Replays
from tests.buffer.buffer_kit import fill, make_run, open_buffer, take, until

SIZE = 2


class NotedEnds:
    """In place of ``RunRecords``: what is noted of runs."""

    def __init__(self) -> None:
        self.states: list[RunState] = []

    async def process_started(self, run_id: str, attempt: int) -> None:
        """It begins."""

    async def end(self, run_id: str, state: RunState, reason: str) -> None:
        """It is over."""
        self.states.append(state)


async def test_the_end_of_a_server_lets_go_of_no_source(tmp_path: Path) -> None:
    """Retention may look once more before the server has ended, and the replay goes on in the next life."""
    async with open_buffer(MemoryStore()) as buffer:
        recorded = await buffer.add(make_run("run-1", SIZE))
        for name in ("a", "b", "c"):
            await fill(recorded, name, [0.0, 1.0])
        await take(recorded, num_groups=3)
        run = make_run("run-2", SIZE, max_buffer_size=SIZE, replay={"source": "run-1"})
        run.replay, run.is_fed = {"source": "run-1"}, True
        entry = await buffer.add(run)
        records = NotedEnds()
        replays = Replays(buffer, records, ReplaySources(buffer, InputFiles(Settings(), tmp_path), None, 1 << 20))
        for end_all in (replays.aclose, lambda: replays.end("run-2")):
            replays.begin("run-2")
            await until(lambda: entry.buffer.groups.num_live_samples == SIZE and entry.buffer.news.has_waiters)
            assert buffer.sources == {"run-1": 1}
            await end_all()
            assert not replays.is_alive("run-2")
            assert buffer.sources == ({"run-1": 1} if end_all == replays.aclose else {})
        assert records.states == []
        entry.buffer.run.settings = make_run("run-2", SIZE).settings
        replays.begin("run-2")
        await until(lambda: not replays.is_alive("run-2"))
        assert records.states == [RunState.FINISHED]
        assert buffer.sources == {}
