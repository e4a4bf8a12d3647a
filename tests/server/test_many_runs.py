"""A server with hundreds of ended runs: they are listed page by page, and cost a restart next to nothing."""

import asyncio
import importlib.metadata
from collections import Counter
from pathlib import Path

import pytest

from forebay.buffer.store import index_queries, journal
from forebay.buffer.store.journal import JournalStore
from forebay.client import BufferClient
from forebay.core.run import RunState
from forebay.hooks import plugin_loading
from forebay.hooks.run_hooks import HookRunner
from tests.buffer.buffer_kit import end_process, fill, make_run, open_buffer, states, take
from tests.cli.conftest import Forebay, forebay
from tests.conftest import MakeServer
from tests.kit import TIME_LIMIT_S, ServerProcess, assert_error

__all__ = ["forebay"]

NUM_RUNS = 301
NAMED = "sweep"


async def make_ended(path: Path, num: int) -> None:
    """Ended runs, oldest first: of each a delivered group, and one that no trainer has read."""
    async with open_buffer(JournalStore(path), limit_s=10 * TIME_LIMIT_S) as buffer:
        for number in range(num):
            run = make_run(f"run-{number:04}", name=NAMED if number % 100 == 0 else "")
            run.started_at_s = float(number)
            entry = await buffer.add(run)
            await fill(entry, "taken", [0.0, 1.0])
            await take(entry)
            await fill(entry, "left", [0.0, 1.0])
            await end_process(buffer, run.run_id, RunState.STOPPED)
        await buffer.tick()


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("many") / "data"
    asyncio.run(make_ended(path, NUM_RUNS))
    return path


@pytest.fixture(scope="module")
def crowded(module_servers: MakeServer, data_dir: Path) -> ServerProcess:
    return module_servers(data_dir=data_dir)


def ids(server: ServerProcess, **query: str | int) -> list[str]:
    runs = server.client.get("/v1/runs", params=query).json()["runs"]
    return [run["run_id"] for run in runs]


def test_runs_are_listed_page_by_page_newest_first(crowded: ServerProcess) -> None:
    newest_first = [f"run-{number:04}" for number in reversed(range(NUM_RUNS))]
    found = page = ids(crowded)
    while page:
        page = ids(crowded, before=page[-1])
        assert len(page) <= 100
        found = found + page
    assert found == newest_first
    assert ids(crowded, limit=7, before="run-0100") == newest_first[201:208]
    assert ids(crowded, name=NAMED) == ["run-0300", "run-0200", "run-0100", "run-0000"]
    assert ids(crowded, prefix="run-010", limit=2) == ["run-0109", "run-0108"]
    assert ids(crowded, prefix="swe", before="run-0200") == ["run-0100", "run-0000"]
    assert_error(crowded.client.get("/v1/runs?before=run-x"), 404, "run_not_found")
    assert_error(crowded.client.get("/v1/runs?limit=1001"), 422, "invalid_input", "limit")


def test_a_trainer_gets_every_run_oldest_first(crowded: ServerProcess) -> None:
    with BufferClient(crowded.url) as client:
        assert [run.run_id for run in client.runs()] == [f"run-{number:04}" for number in range(NUM_RUNS)]
        assert [run.run_id for run in client.runs(NAMED)] == ["run-0000", "run-0100", "run-0200", "run-0300"]


def test_status_lists_the_newest_runs_and_finds_the_oldest(forebay: Forebay, crowded: ServerProcess) -> None:
    target = ["--url", crowded.url]
    listed = forebay("status", *target).out
    assert [number for number in range(NUM_RUNS) if f"run-{number:04}" in listed] == [*range(NUM_RUNS - 100, NUM_RUNS)]
    assert "forebay status --all" in listed
    everything = forebay("status", "--all", *target).out
    assert everything.count("run-0") == NUM_RUNS
    assert "--all" not in everything
    assert forebay("status", NAMED, "--all", *target).code == 2
    assert "run-0300" in forebay("status", NAMED, *target).out
    assert "run-0007" in forebay("status", "run-0007", *target).out
    ambiguous = forebay("status", "run-00", *target)
    assert "could be any of 100 runs" in ambiguous.err
    assert "did you mean sweep?" in " ".join(forebay("status", "sweeep", *target).err.split())


def test_an_ended_run_delivers_what_is_left_after_a_restart(crowded: ServerProcess) -> None:
    with BufferClient(crowded.url) as client:
        client.attach("run-0005")
        batch = client.read(num_groups=1)
        assert batch is not None
        assert {row["instance_id"] for row in batch.rows} == {"left"}
        client.ack(batch)
        undone = client.rewind(None)
        assert undone.num_groups == 2


async def test_a_restart_asks_the_index_for_many_runs_at_once(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: Counter[str] = Counter()
    ask, entry_points = index_queries.ask, importlib.metadata.entry_points

    def counting(*given: object) -> object:
        asked["connections"] += 1
        return ask(*given)

    def reading(**given: str) -> object:
        asked["looks at installed packages"] += 1
        return entry_points(**given)

    monkeypatch.setattr(journal.index_queries, "ask", counting)
    monkeypatch.setattr(plugin_loading, "entry_points", reading)
    copied = data_dir.parent / "copied"
    await make_ended(copied, 96)
    asked.clear()
    make_hooks = lambda run: HookRunner(task_type=run.task_type)  # noqa: E731
    async with open_buffer(JournalStore(copied), make_hooks=make_hooks) as buffer:
        assert len(buffer.entries) == 96
        assert asked["connections"] < 96
        assert asked["looks at installed packages"] <= 1
        # Of what is over, nothing is in memory; the store knows it.
        assert states(buffer.get("run-0000")) == {("left", 0): "ready"}
        assert len(await buffer.store.load_groups("run-0000")) == 2
