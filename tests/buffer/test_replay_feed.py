"""A recording is fed into another run: the same groups, in the same order, for the same reasons, of the same bodies."""

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forebay.buffer import replay_feed
from forebay.buffer.admission import announce
from forebay.buffer.admission import write as write_sample
from forebay.buffer.buffer import Buffer, LiveRun
from forebay.buffer.journal_source import JournalSource
from forebay.buffer.replay_feed import Feed
from forebay.buffer.store.abc import Store
from forebay.buffer.store.journal import JournalStore
from forebay.buffer.store.memory import MemoryStore
from forebay.core.binary_sample import pack
from forebay.core.clock import ManualClock
from forebay.core.errors import BodyUnreadable
from forebay.core.group import GroupState
from forebay.core.records.rows import GroupRow, SampleRow
from forebay.core.sample import read_any_sample
from forebay.replay.replayed_bodies import replayed_from, splice, strip
from tests.buffer.buffer_kit import (
    end_process,
    fill,
    make_run,
    open_buffer,
    read,
    take,
    turns,
    until,
    write,
)
from tests.buffer.test_recovery import FailsOnce
from tests.kit import make_sample

SIZE = 4
PAYLOAD: dict[str, Any] = {
    "group_size": SIZE,
    "min_valid_group_size_ratio": 0.75,
    "min_timeout_group_size_ratio": 0.5,
}


async def record(buffer: Buffer, clock: ManualClock) -> LiveRun:
    """A run with a group of each kind."""
    entry = await buffer.add(make_run("run-1", **PAYLOAD))
    await fill(entry, "whole", [0.0, 1.0, 0.0, 1.0])
    await fill(entry, "equal", [1.0] * SIZE)  # not valid: every sample has the same reward
    await fill(entry, "some failed", [0.0, None, 1.0, 0.5])
    await fill(entry, "all failed", [None] * SIZE)
    await fill(entry, "slots", [1.0, 0.0, 1.0, 0.0], epoch=3)
    await write(entry, instance_id="slots", epoch=3, slot=2)  # surplus
    await take(entry, num_groups=3)
    await fill(entry, "whole", [1.0])  # of its second epoch, since its first was full
    await write(entry, instance_id="slots", epoch=3, slot=1)  # late
    await fill(entry, "salvaged", [0.0, 0.0])
    await fill(entry, "too few", [1.0])
    await announce(entry.buffer, [("never came", 7)])
    clock.advance(4_000)
    await buffer.tick()
    await fill(entry, "short", [0.0, 1.0, 1.0])
    await take(entry, num_groups=2)  # the salvaged one, and the short one as it is
    await forks(entry)
    put_binary(entry)
    await fill(entry, "left open", [0.0])
    await entry.buffer.save_run()
    return entry


async def forks(entry: LiveRun) -> None:
    for slot in range(SIZE):
        common = {"instance_id": "forks", "epoch": 0, "slot": slot, "rollout_id": f"r{slot}", "reward": slot % 2}
        for fork in (2, 1, 0):
            await write(entry, uid=f"fork-{slot}-{fork}", fork=fork, **common)


def put_binary(entry: LiveRun) -> None:
    for slot in range(SIZE):
        sample = make_sample(uid=f"binary-{slot}", instance_id="binary", epoch=0, slot=slot, reward=slot / 8)
        body = pack(json.dumps(sample).encode() + b"\n", b"\1\0\0\0" * 5, None, b"\0\0\1\1\1")
        write_sample(entry.buffer, read_any_sample(body))


def in_order(groups: list[GroupRow]) -> list[GroupRow]:
    return sorted(groups, key=lambda group: (not group.closed_seq, group.closed_seq, group.number))


async def feed(buffer: Buffer, run_id: str = "run-2", **more: Any) -> tuple[LiveRun, Feed]:
    """Replay the run that was recorded into a new one, or go on with that."""
    source = JournalSource(buffer.get("run-1").run, buffer.store)
    if run_id not in [entry.run.run_id for entry in buffer.entries]:
        await buffer.add(make_run(run_id, **PAYLOAD))
    made = Feed(lambda: buffer.get(run_id), source, in_order(list(await source.groups())), **more)
    await made.run()
    return buffer.get(run_id), made


async def outcomes(buffer: Buffer, run_id: str) -> dict[tuple[Any, int], tuple[Any, ...]]:
    source = JournalSource(buffer.get(run_id).run, buffer.store)
    groups = await source.groups()
    found = await source.samples([group.group_id for group in groups])
    told = {}
    for group in groups:
        state = "ready" if group.state in ("ready", "leased", "acked") else group.state
        bodies = await source.bodies(found[group.group_id])
        samples = [
            (row.uid, row.slot, row.outcome, row.reward, row.fork, row.error, row.reward_start, strip(body))
            for row, body in zip((each.row for each in found[group.group_id]), bodies, strict=True)
        ]
        whole = (state, group.reason, group.is_salvaged, group.num_samples, group.num_failed, sorted(samples))
        told[group.instance_id, group.epoch] = whole
    return told


async def drain(entry: LiveRun) -> list[tuple[Any, list[str]]]:
    """Read everything; groups in the order in which they went out, with the uids of their samples."""
    groups = []
    while batch := await read(entry, num_groups=1):
        samples = batch.staged[0].samples
        groups.append((batch.groups[0].instance_id, [sample.row.uid for sample in samples]))
        entry.delivery.leases.ack_soon(batch.batch_id)
    return groups


async def test_same_groups_for_the_same_reasons(store: Store, clock: ManualClock) -> None:
    async with open_buffer(store, clock) as buffer:
        entry = await record(buffer, clock)
        again, fed = await feed(buffer)
        for each in (entry, again):
            await drain(each)
        recorded, replayed = await outcomes(buffer, "run-1"), await outcomes(buffer, "run-2")
        assert replayed == recorded
        kinds = {what[:3] for what in recorded.values()}
        assert kinds >= {
            ("ready", "", False),
            ("ready", "", True),
            ("discarded", "invalid", False),
            ("discarded", "failed", False),
            ("discarded", "timed_out", False),
            ("open", "", False),
        }
        assert {sample[2] for what in recorded.values() for sample in what[5]} == {"member", "late", "surplus"}
        members = [sample for what in recorded.values() for sample in what[5] if sample[2] == "member"]
        assert fed.counts.hits == sum(not sample[4] for sample in members)  # rollouts: a fork is none of its own
        assert (fed.counts.tokens, fed.counts.missing) == (3 * SIZE, 0)


async def test_a_group_goes_out_when_it_did(store: Store, clock: ManualClock) -> None:
    """What was closed short keeps its place among those that were full."""
    async with open_buffer(store, clock) as buffer:
        entry = await buffer.add(make_run("run-1", **PAYLOAD))
        await fill(entry, "a", [0.0, 1.0, 0.0, 1.0])
        await buffer.get("run-1").group_judge.evaluate()
        await fill(entry, "salvaged", [0.0, 1.0])
        clock.advance(301)
        await buffer.tick()
        await fill(entry, "b", [0.0, 1.0, 0.0, 1.0])
        await fill(entry, "c", [0.0, 1.0, 1.0])
        order = await drain(entry)
        again, _ = await feed(buffer)
        assert await drain(again) == order
        assert [(name, len(uids)) for name, uids in order] == [("a", 4), ("salvaged", 2), ("b", 4), ("c", 3)]


async def test_nobody_sees_a_part_of_a_group(clock: ManualClock) -> None:
    async with open_buffer(MemoryStore(), clock) as buffer:
        entry = await buffer.add(make_run("run-1", **PAYLOAD))
        for number in range(40):
            await fill(entry, f"group {number}", [0.0, 1.0, 0.0, 1.0])
        again = await buffer.add(make_run("run-2", **PAYLOAD))
        reader = asyncio.create_task(drain_with(again, 40))
        await turns()
        await feed(buffer)
        assert await reader == [SIZE] * 40


async def drain_with(entry: LiveRun, number: int) -> list[int]:
    """How many samples each group went out with, for a reader that was there first."""
    sizes = []
    while len(sizes) < number:
        batch = await read(entry, num_groups=1, wait_s=10.0)
        assert batch is not None
        sizes.append(batch.groups[0].row.num_samples)
        entry.delivery.leases.ack_soon(batch.batch_id)
    return sizes


async def test_fed_again_it_changes_nothing(store: Store, clock: ManualClock) -> None:
    async with open_buffer(store, clock) as buffer:
        await record(buffer, clock)
        entry, first = await feed(buffer)
        num_groups, before = entry.buffer.groups.num_opened, await outcomes(buffer, "run-2")
        _, second = await feed(buffer)
        assert await outcomes(buffer, "run-2") == before
        assert entry.buffer.groups.num_opened == num_groups
        assert (second.counts.hits, second.counts.tokens) == (first.counts.hits, 0)
        assert entry.buffer.counts["duplicate"] == 0


async def test_waits_for_room(clock: ManualClock) -> None:
    async with open_buffer(MemoryStore(), clock) as buffer:
        entry = await buffer.add(make_run("run-1", **PAYLOAD))
        for number in range(12):
            await fill(entry, f"group {number}", [0.0, 1.0, 0.0, 1.0])
        again = await buffer.add(make_run("run-2", max_buffer_size=8, **PAYLOAD))
        work = asyncio.create_task(feed(buffer))
        await until(lambda: again.buffer.groups.num_live_samples == 8)
        await turns(50)
        assert again.buffer.groups.num_live_samples == 8
        assert len(await drain_with(again, 12)) == 12
        await work


@pytest.mark.parametrize("became", ["member", "late"])
async def test_a_body_that_is_gone_costs_its_group(
    store: Store, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, became: str
) -> None:
    async with open_buffer(store, clock) as buffer:
        await record(buffer, clock)
        before = await outcomes(buffer, "run-1")
        lost = next(uid for uid, *_, kind in samples_of(before) if kind == became)
        whole = JournalSource.bodies

        async def bodies(self: JournalSource, samples: Any) -> Any:
            if any(sample.row.uid == lost for sample in samples):
                raise BodyUnreadable("its checksum is another")
            return await whole(self, samples)

        monkeypatch.setattr(JournalSource, "bodies", bodies)
        entry, fed = await feed(buffer)
        monkeypatch.undo()
        await drain(entry)
        await drain(buffer.get("run-1"))
        recorded, replayed = await outcomes(buffer, "run-1"), await outcomes(buffer, "run-2")
        differs = [key for key in recorded if recorded[key] != replayed[key]]
        if became == "late":
            assert [(len(recorded[key][5]) - len(replayed[key][5]), fed.lost) for key in differs] == [(1, {})]
            assert fed.counts.missing == 1
            return
        assert [replayed[key][:2] for key in differs] == [("discarded", "unreadable")]
        group = next(iter(fed.lost))
        assert "its checksum is another" in entry.buffer.groups.by_id[group].row.detail
        assert fed.counts.missing == recorded[differs[0]][3]
        # Fed again, now that it can be read, the group stays what it is.
        assert (await feed(buffer))[0].buffer.groups.by_id[group].state is GroupState.DISCARDED


async def test_a_sample_that_is_not_recorded_any_more_costs_its_group(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the journal says of one whose record is damaged: what is left of its group is no group."""
    async with open_buffer(MemoryStore(), clock) as buffer:
        entry = await buffer.add(make_run("run-1", **PAYLOAD))
        for name in ("a", "b"):
            await fill(entry, name, [0.0, 1.0, 0.0, 1.0])
        await drain(entry)
        whole = JournalSource.samples

        async def samples(self: JournalSource, group_ids: Any) -> Any:
            found = await whole(self, group_ids)
            return {key: each[:-1] if each[0].row.instance_id == "a" else each for key, each in found.items()}

        monkeypatch.setattr(JournalSource, "samples", samples)
        again, fed = await feed(buffer)
        assert [name for name, _ in await drain(again)] == ["b"]
        assert list(fed.lost.values()) == ["only 3 of its 4 samples are recorded"]
        assert (fed.counts.hits, fed.counts.missing) == (SIZE, SIZE)
        (lost,) = again.buffer.groups.in_state(GroupState.DISCARDED)
        assert (lost.instance_id, lost.row.reason) == ("a", "unreadable")


def samples_of(told: dict[Any, Any]) -> list[tuple[str, str]]:
    return [(sample[0], sample[2]) for what in told.values() for sample in what[5] if len(what[5]) >= SIZE]


@pytest.mark.parametrize("fail_at", [1, 4, 7])
async def test_waits_for_the_disk(
    tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, fail_at: int
) -> None:
    """Writes that fail are made once more, when the disk takes them again."""
    monkeypatch.setattr(replay_feed, "UNSTORED_STEPS", 1)  # else there is one write of all
    disk = FailsOnce()
    async with open_buffer(JournalStore(tmp_path, files=disk), clock) as buffer:
        await record(buffer, clock)
        again = await buffer.add(make_run("run-2", **PAYLOAD))
        disk.fail_at = disk.num_syncs + fail_at
        await feed(buffer)
        assert disk.num_syncs > disk.fail_at
        assert buffer.get("run-2") is not again  # a recovery took over
        for run_id in ("run-1", "run-2"):
            await drain(buffer.get(run_id))
        assert await outcomes(buffer, "run-2") == await outcomes(buffer, "run-1")


async def test_other_samples_are_made_of_them(clock: ManualClock) -> None:
    async def turned(recorded: Any) -> Any:
        return [(changed(sample), body) for sample, body in recorded]

    def changed(sample: SampleRow) -> SampleRow:
        return msgspec.structs.replace(sample, reward=None if sample.reward is None else 1 - sample.reward)

    async with open_buffer(MemoryStore(), clock) as buffer:
        entry = await buffer.add(make_run("run-1", **PAYLOAD))
        await fill(entry, "a", [0.0, 0.0, 0.0, 1.0])
        again, _ = await feed(buffer, change=turned)
        [group] = again.buffer.groups.in_state(GroupState.OPEN)
        assert [sample.row.reward for sample in group.samples] == [1, 1, 1, 0]


@pytest.mark.parametrize("ending", [b"", b"\n", b"  \r\n"])
def test_only_the_last_field_of_a_body_is_ours(ending: bytes) -> None:
    body = b'{"uid":"a","reward":1,"x":{"a":1,"replayed_from":{"run_id":"r","uid":"u","substitute":false}}}' + ending
    assert replayed_from(body) is None
    assert strip(body) == body
    made = splice(body, "run-1", 'a"\u00e9', substitute=True)
    assert json.loads(made)["replayed_from"] == {"run_id": "run-1", "uid": 'a"é', "substitute": True}
    assert strip(made) == body
    again = splice(made, "run-2", "a")  # a replay of a replay has one such field
    assert again.count(b"replayed_from") == 2
    assert strip(again) == body


async def test_ends_with_the_run(clock: ManualClock) -> None:
    async with open_buffer(MemoryStore(), clock) as buffer:
        await record(buffer, clock)
        entry, _ = await feed(buffer)
        entry.run.is_last_slot_reported = True
        await end_process(buffer, "run-2")
        await buffer.tick()
        assert not entry.buffer.groups.is_any(GroupState.OPEN)
        assert entry.run.has_ended
