"""The disk refuses once, at every possible moment: nothing acknowledged is lost, nothing else is handed out."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from forebay.buffer.admission import announce
from forebay.buffer.buffer import Buffer, LiveRun
from forebay.buffer.reads.delivery import LeasedBatch
from forebay.buffer.store.journal import JournalStore
from forebay.core.clock import ManualClock
from forebay.core.errors import StorageFailed
from forebay.core.run import Run
from forebay.hooks.run_hooks import HookRunner
from tests.buffer.buffer_kit import (
    built_in_hooks,
    check_books,
    fill,
    make_run,
    open_buffer,
    put,
    read,
    states,
    take,
    turns,
    uids_of,
    until,
    write,
)
from tests.buffer.store.faulty_disks import RefusingFiles


class FailsOnce(RefusingFiles):
    """A disk that refuses to sync once, at the ``fail_at``-th time from when that is set."""

    def __init__(self) -> None:
        self.free_bytes = None
        self.fail_at = 0
        self.num_syncs = 0

    @property
    def refuses_sync(self) -> bool:  # type: ignore[override]  # here it counts
        self.num_syncs += 1
        return self.num_syncs == self.fail_at


async def healthy(buffer: Buffer) -> LiveRun:
    """The run, once the journal takes writes again."""
    await buffer.update("run-1", lambda _: None)
    return buffer.get("run-1")


async def persist(buffer: Buffer, act: Callable[[LiveRun], Awaitable[Any]]) -> Any:
    """Do it until the disk has taken it, as clients do."""
    while True:
        entry = await healthy(buffer)
        try:
            return await act(entry)
        except StorageFailed:
            continue


def snapshot(entry: LiveRun) -> dict[str, Any]:
    groups = {
        group.group_id: (
            *(group.state, group.row.reason, group.row.order, group.row.closed_seq, group.row.is_reported),
            *(group.row.batch_id, group.row.num_samples, group.row.num_failed, group.row.surplus_due),
            *(group.row.is_salvaged, [sample.row.uid for sample in group.samples], sorted(group.slots)),
        )
        for group in entry.buffer.groups.by_id.values()
    }
    numbers = (entry.buffer.groups.num_live_samples, entry.buffer.groups.num_live_bytes, entry.buffer.groups.next_order)
    run = entry.run.document()
    return {"groups": groups, "uids": sorted(entry.buffer.uids), "numbers": numbers, "run": run}


class Script:
    """A life of a run, and what its clients were told."""

    def __init__(self, buffer: Buffer, clock: ManualClock) -> None:
        self.buffer = buffer
        self.clock = clock
        self.acknowledged: list[str] = []
        self.delivered: list[list[str]] = []
        self.finished: Counter[Any] = Counter()

    async def play(self) -> None:
        await self.write(1, 0, 0.0)
        await persist(self.buffer, lambda entry: announce(entry.buffer, [(4, 0)]))
        await self.write(1, 1, 1.0)
        await asyncio.gather(self.write(2, 0, 0.0), self.write(2, 1, 1.0), self.write(3, 0, None))
        await self.give_back()
        await self.deliver()
        await self.write(3, 1, None)
        await self.deliver(at_least=0)
        self.clock.advance(3_601)
        await self.until(lambda entry: states(entry)[4, 0] != "open")
        await self.write(5, 0, 1.0)
        await self.write(5, 1, 0.0)
        await self.deliver()

    async def write(self, instance_id: int, slot: int, reward: float | None) -> None:
        sample = {"uid": f"{instance_id}/{slot}", "instance_id": instance_id, "epoch": 0, "slot": slot}
        outcome = {"reward": reward} if reward is not None else {"reward": ..., "status": "failed", "error": "no"}
        await persist(self.buffer, lambda entry: write(entry, **sample, **outcome))
        self.acknowledged.append(sample["uid"])

    async def give_back(self) -> None:
        batch: LeasedBatch | None = await persist(self.buffer, read)
        assert batch is not None
        self.buffer.get("run-1").delivery.leases.release_soon(batch.batch_id)

    async def deliver(self, at_least: int = 1) -> None:
        batch: LeasedBatch | None = await persist(self.buffer, read)
        assert batch is not None or at_least == 0
        if batch is not None:
            self.delivered += [[f"{group.instance_id}/{slot}" for slot in range(2)] for group in batch.groups]
            expected = [uid for group in self.delivered[-len(batch.groups) :] for uid in group]
            assert sorted(uids_of(batch)) == sorted(expected)
            self.finished.update(batch.meta_info["finished_groups"])
            self.buffer.get("run-1").delivery.leases.ack_soon(batch.batch_id)

    async def until(self, condition: Callable[[LiveRun], bool]) -> None:
        while not condition(await healthy(self.buffer)):
            await self.buffer.tick()


async def play(path: Path, fail_at: int) -> bool:
    """The whole life with one failure in it; whether the failure came."""
    clock, files = ManualClock(), FailsOnce()
    async with open_buffer(JournalStore(path, files=files), clock) as buffer:
        files.num_syncs, files.fail_at = 0, fail_at
        try:
            await buffer.add(make_run())
        except StorageFailed:
            with pytest.raises(LookupError):
                buffer.get("run-1")
            await recovered(buffer)
            await buffer.add(make_run())
        script = Script(buffer, clock)
        await script.play()
        entry = await healthy(buffer)
        check_books(entry)
        before = snapshot(entry)
        assert set(states(entry).values()) == {"acked", "discarded: failed", "discarded: timed_out"}
    async with open_buffer(JournalStore(path), clock) as buffer:
        after = snapshot(buffer.get("run-1"))
        check_books(buffer.get("run-1"))
    assert after == before
    assert set(script.acknowledged) == set(after["uids"])
    assert sorted(script.delivered) == [["1/0", "1/1"], ["2/0", "2/1"], ["5/0", "5/1"]], "each once"
    assert script.finished == {1: 1, 2: 1, 3: 1, 4: 1, 5: 1}, "each told once"
    return files.num_syncs >= fail_at


async def recovered(buffer: Buffer) -> None:
    await until(lambda: buffer.is_healthy)


async def test_failure_at_any_commit_loses_and_repeats_nothing(tmp_path: Path) -> None:
    fail_at = 1
    while await play(tmp_path / str(fail_at), fail_at):
        fail_at += 1
    assert fail_at > 15


async def test_write_that_failed_is_refused_and_not_in_memory(tmp_path: Path) -> None:
    files = RefusingFiles()
    async with open_buffer(JournalStore(tmp_path, files=files)) as buffer:
        entry = await buffer.add(make_run())
        await write(entry, instance_id=1, uid="a", reward=0.0)
        files.refuses_sync = True
        for _ in range(2):
            with pytest.raises(StorageFailed):
                await write(entry, instance_id=1, uid="b", reward=1.0)
        with pytest.raises(StorageFailed):
            await read(entry)
        assert not buffer.is_healthy
        files.refuses_sync = False
        entry = await healthy(buffer)
        assert [s.row.uid for s in next(iter(entry.buffer.groups.by_id.values())).samples] == ["a"]
        assert await fill(entry, 1, [1.0]) == ["member"]
        assert len((await take(entry)).rows) == 2


async def test_judgement_made_while_the_disk_fails_reaches_no_disk(tmp_path: Path) -> None:
    """The object of before goes on for a moment. What it decides from samples that are lost must not last."""
    files = RefusingFiles()
    async with open_buffer(JournalStore(tmp_path, files=files)) as buffer:
        entry = await buffer.add(make_run())
        await write(entry, instance_id=1, uid="a", reward=0.0)
        files.refuses_sync = True
        lost = put(entry, instance_id=1, uid="b", reward=1.0)
        async with entry.buffer.lock:
            with pytest.raises(StorageFailed):
                await lost.stored
            files.refuses_sync = False
            await buffer.store.recover()
            await entry.group_judge.evaluate()
            assert states(entry)[1, 0] == "ready"
        entry = await healthy(buffer)
        assert states(entry)[1, 0] == "open"
        assert await fill(entry, 1, [1.0]) == ["member"]


async def test_batch_on_its_way_out_while_the_disk_fails_is_not_sent_again(tmp_path: Path) -> None:
    files = RefusingFiles()
    async with open_buffer(JournalStore(tmp_path, files=files)) as buffer:
        entry = await buffer.add(make_run())
        await fill(entry, 1, [0.0, 1.0])
        await fill(entry, 2, [0.0, 1.0])
        leased, arrived = await read(entry, num_groups=1), await read(entry, num_groups=1)
        assert leased is not None
        assert arrived is not None
        files.refuses_sync = True
        entry.delivery.leases.ack_soon(arrived.batch_id)
        with pytest.raises(StorageFailed):
            await write(entry, instance_id=3)
        files.refuses_sync = False
        now = await healthy(buffer)
        assert states(now) == {(1, 0): "leased", (2, 0): "acked"}
        assert await read(now) is None
        entry.delivery.leases.ack_soon(leased.batch_id)
        assert states(now) == {(1, 0): "acked", (2, 0): "acked"}
        check_books(now)
    async with open_buffer(JournalStore(tmp_path)) as buffer:
        assert states(buffer.get("run-1")) == {(1, 0): "acked", (2, 0): "acked"}


async def test_batch_given_back_while_the_disk_fails_is_ready_again(tmp_path: Path) -> None:
    files = RefusingFiles()
    async with open_buffer(JournalStore(tmp_path, files=files)) as buffer:
        entry = await buffer.add(make_run())
        await fill(entry, 1, [0.0, 1.0])
        batch = await read(entry)
        assert batch is not None
        files.refuses_sync = True
        entry.delivery.leases.release_soon(batch.batch_id)
        await turns()
        files.refuses_sync = False
        entry = await healthy(buffer)
        assert uids_of(await take(entry)) == uids_of(batch)


async def test_nobody_meets_a_run_that_is_half_loaded(tmp_path: Path) -> None:
    files = RefusingFiles()
    async with open_buffer(JournalStore(tmp_path, files=files)) as buffer:
        entry = await buffer.add(make_run())
        await fill(entry, 1, [0.0])
        files.refuses_sync = True
        with pytest.raises(StorageFailed):
            await write(entry, instance_id=1, reward=1.0)
        files.refuses_sync = False
        while not buffer.is_healthy:
            with pytest.raises(StorageFailed):
                put(buffer.get("run-1"), instance_id=1, reward=1.0)
            await asyncio.sleep(0)
        assert await fill(buffer.get("run-1"), 1, [1.0]) == ["member"]


async def test_failure_while_loading_again_is_tried_again(tmp_path: Path) -> None:
    """The second failure hits what the recovery itself writes: a lease that was lost is given back."""
    files = RefusingFiles()
    async with open_buffer(JournalStore(tmp_path, files=files)) as buffer:
        entry = await buffer.add(make_run())
        await fill(entry, 1, [0.0, 1.0])
        batch = await read(entry)
        assert batch is not None
        files.free_bytes = 0
        entry.delivery.leases.release_soon(batch.batch_id)
        await until(lambda: not buffer.is_healthy)
        files.free_bytes = 64 * 1024 + 20  # the probe of the recovery fits, what it writes then does not
        await until(lambda: files.free_bytes == 0)
        files.free_bytes = None
        assert uids_of(await take(await healthy(buffer))) == uids_of(batch)


async def test_failed_start_leaves_the_earlier_run_under_its_name(tmp_path: Path) -> None:
    files = RefusingFiles()
    async with open_buffer(JournalStore(tmp_path, files=files)) as buffer:
        await buffer.add(make_run())
        files.refuses_sync = True
        with pytest.raises(StorageFailed):
            await buffer.add(make_run("run-2"))
        files.refuses_sync = False
        await healthy(buffer)
        newest = buffer.newest("")
        assert newest is not None
        assert newest.run.run_id == "run-1"
        with pytest.raises(LookupError):
            buffer.by_key("key-of-run-2")


async def test_hooks_replaced_during_a_recovery_are_those_of_the_run(tmp_path: Path) -> None:
    made: list[str] = []

    def hooks(run: Run) -> HookRunner:
        made.append(run.run_id)
        return built_in_hooks(run)

    files = RefusingFiles()
    async with open_buffer(JournalStore(tmp_path, files=files), make_hooks=hooks) as buffer:
        entry = await buffer.add(make_run())
        old_hooks = entry.buffer.hooks
        async with entry.buffer.lock:
            files.refuses_sync = True
            with pytest.raises(StorageFailed):
                await write(entry, instance_id=1)
            files.refuses_sync = False
            replacing = asyncio.create_task(buffer.replace_hooks("run-1"))
            await turns()
        await replacing
        entry = await healthy(buffer)
        assert entry.buffer.hooks is not old_hooks
        assert len(made) == 2


async def test_damaged_body_costs_its_group_and_not_the_reads(tmp_path: Path) -> None:
    async with open_buffer(JournalStore(tmp_path)) as buffer:
        entry = await buffer.add(make_run())
        await fill(entry, 1, [0.0, 1.0])
        await fill(entry, 2, [0.0, 1.0])
        sample = next(iter(entry.buffer.groups.by_id.values())).samples[0]
        assert sample.location is not None
        sample.location = type(sample.location)(sample.location.segment + 7, 0, sample.num_bytes)
        with pytest.raises(StorageFailed):
            await read(entry)
        assert [g.instance_id for g in (await take(entry)).groups] == [2]
        assert states(entry)[1, 0] == "discarded: unreadable"
        assert buffer.is_healthy
