"""``kill -9`` of a whole server under load, again and again on the same data directory."""

import os
import random
from collections import defaultdict
from pathlib import Path

import pytest

from forebay.buffer.store.data_dir import DataDir
from forebay.buffer.store.index import START
from forebay.buffer.store.journal import JournalStore
from forebay.buffer.store.log_segments import SegmentLog
from forebay.core.group import GroupState, check_transition
from forebay.core.ids import group_id
from forebay.core.records.disk_files import DiskFiles
from forebay.core.records.rows import GroupRow, SampleRow
from tests.conftest import MakeServer
from tests.liveness import Liveness
from tests.soak.kill_load import GROUP_SIZE, KillLoad, Ledger

RUN_FOR_ACKNOWLEDGEMENTS = [1, 5, 30, 80, 150]
ROUNDS = int(os.environ.get("ROUNDS", "20"))
"""By hand, `make test-soak ROUNDS=100`."""


def kill_rounds(make_server: MakeServer, rounds: int) -> tuple[Path, str, Ledger]:
    """The data directory, the run and the clients' account after so many deaths."""
    rng = random.Random(rounds)
    server = make_server(segment_bytes=1 << 16, remembered_samples=64)
    run = server.start_run(group_size=GROUP_SIZE)
    load = KillLoad(server, run)
    try:
        with Liveness(server):
            for _ in range(rounds):
                load.wait_for_acknowledgements(rng.choice(RUN_FOR_ACKNOWLEDGEMENTS))
                server.kill9()
                if rng.random() < 0.2:
                    (server.data_dir / "index.sqlite").unlink()
                server.restart()
            load.wait_for_acknowledgements(30)
            ledger = load.finish()
    except BaseException:
        load.abandon()
        raise
    assert server.stop() == 0
    return server.data_dir, run.run_id, ledger


async def check_samples(data_dir: Path, run_id: str, ledger: Ledger) -> dict[str, GroupState]:
    """Everything acknowledged is there once, in its place; the states of the groups by id."""
    assert ledger.broken == []
    async with JournalStore(data_dir) as store:
        assert store.stats().num_quarantined == 0
        groups = await store.load_groups(run_id)
        found: dict[str, int] = defaultdict(int)
        for group in groups:
            for sample in await store.samples(run_id, group.group_id):
                assert (sample.row.outcome, sample.row.uid) == ("member", f"{group.instance_id}/{sample.row.slot}")
                found[sample.row.uid] += 1
        assert set(found.values()) == {1}
        assert set(found) == ledger.acknowledged
        return {group.group_id: group.state for group in groups}


def check_receipts(ledger: Ledger, states: dict[str, GroupState]) -> None:
    """Every group arrived and was acknowledged, once: whichever replies the deaths of the server cut off."""
    received = ledger.times_received()
    assert {group_id(instance_id, 0) for instance_id in received} == set(states)
    assert set(states.values()) == {GroupState.ACKED}
    assert [instance_id for instance_id, receipts in received.items() if len(receipts) > 1] == []


def check_journal(data_dir: Path, run_id: str, states: dict[str, GroupState]) -> int:
    """Replay the log: each step of each group is one that the table allows, and they end where the index says."""
    directory = DataDir(data_dir)
    log = SegmentLog(directory.segments, directory.quarantine, DiskFiles())
    log.open()
    now: dict[str, GroupState] = {}
    num_members: dict[str, int] = defaultdict(int)
    for record in log.scan(START):
        for row in record.rows:
            if isinstance(row, SampleRow) and row.run_id == run_id:
                now.setdefault(row.group_id, GroupState.OPEN)
                assert now[row.group_id] is GroupState.OPEN, "a member came after its group had closed"
                num_members[row.group_id] += 1
            elif isinstance(row, GroupRow) and row.run_id == run_id:
                step(now, row, num_members[row.group_id])
    num_segments = log.num_segments
    log.close()
    assert now == states
    return num_segments


def step(now: dict[str, GroupState], row: GroupRow, num_members: int) -> None:
    before = now.setdefault(row.group_id, GroupState.OPEN)
    if row.state is not before:
        check_transition(before, row.state)
        assert num_members == GROUP_SIZE
    now[row.group_id] = row.state


async def check_all(make_server: MakeServer, rounds: int) -> None:
    data_dir, run_id, ledger = kill_rounds(make_server, rounds)
    states = await check_samples(data_dir, run_id, ledger)
    check_receipts(ledger, states)
    assert check_journal(data_dir, run_id, states) > 1, "segments were rolled"
    assert len(ledger.receipts) > rounds


async def test_killed_server_loses_nothing_acknowledged_and_sends_nothing_twice(make_server: MakeServer) -> None:
    await check_all(make_server, rounds=5)


@pytest.mark.soak
async def test_killed_server_loses_nothing_in_many_rounds(make_server: MakeServer) -> None:
    await check_all(make_server, ROUNDS)
