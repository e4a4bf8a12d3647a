"""Which group a sample belongs to, and what becomes of samples that no group can take."""

import pytest

from forebay.buffer.admission import announce, expect_repeats
from forebay.buffer.store.abc import Store
from forebay.core.clock import ManualClock
from forebay.core.errors import BufferFull
from forebay.core.group import TRANSITIONS, GroupState, check_transition
from tests.buffer.buffer_kit import (
    check_books,
    fill,
    make_run,
    open_buffer,
    put,
    read,
    states,
    take,
    turns,
    write,
)


async def test_epochs_that_a_start_skips_are_not_numbered_again(store: Store) -> None:
    async with open_buffer(store) as buffer:
        entry = await buffer.add(make_run(skip=[7, 7]))
        await fill(entry, 7, [0.0])
        assert list(states(entry)) == [(7, 2)]


async def test_next_epoch_is_behind_the_last_in_number_not_in_time(store: Store) -> None:
    async with open_buffer(store) as buffer:
        entry = await buffer.add(make_run())
        await fill(entry, 7, [0.0, 1.0], epoch=1)
        await fill(entry, 7, [0.0, 1.0], epoch=0)
        await fill(entry, 7, [0.5])
        assert states(entry)[7, 2] == "open"


async def test_repeated_uid_counts_once(store: Store) -> None:
    async with open_buffer(store) as buffer:
        entry = await buffer.add(make_run(group_size=4))
        first, again = put(entry, uid="u", instance_id=7), put(entry, uid="u", instance_id=7)
        assert (first.is_duplicate, again.is_duplicate) == (False, True)
        assert again.stored.done() == first.stored.done()
        await again.stored
        assert first.stored.done(), "a duplicate is acknowledged when the original is on the disk"
        assert put(entry, uid="u", instance_id=8).is_duplicate
        assert entry.buffer.groups.num_live_samples == 1


async def test_sample_for_a_slot_that_no_group_has_opens_none(store: Store) -> None:
    async with open_buffer(store) as buffer:
        entry = await buffer.add(make_run())
        result = await write(entry, instance_id=7, epoch=3, slot=2, uid="u")
        assert (result.outcome, states(entry)) == ("surplus", {})
        assert put(entry, uid="u").is_duplicate


@pytest.mark.parametrize(("later_s", "outcome"), [(300.0, "late"), (300.5, "member")])
async def test_sample_after_a_short_close_is_late_for_one_timeout(
    store: Store, clock: ManualClock, later_s: float, outcome: str
) -> None:
    async with open_buffer(store, clock) as buffer:
        entry = await buffer.add(make_run(group_size=4))
        await fill(entry, 7, [0.0])
        clock.advance(301)
        await buffer.tick()
        assert states(entry) == {(7, 0): "discarded: timed_out"}
        clock.advance(later_s)
        assert await fill(entry, 7, [1.0]) == [outcome]
        assert ((7, 1) in states(entry)) == (outcome == "member")
        check_books(entry)


async def test_as_many_samples_are_late_as_slots_were_empty_and_the_next_group_has_the_rest(
    store: Store, clock: ManualClock
) -> None:
    """A failed sample fills its slot; a sample that names its epoch is late by that, and takes nobody's place."""
    async with open_buffer(store, clock) as buffer:
        entry = await buffer.add(make_run(group_size=4))
        await fill(entry, 7, [0.0, None])
        clock.advance(301)
        await buffer.tick()
        assert await fill(entry, 7, [0.5], epoch=0, slot=3) == ["late"]
        assert await fill(entry, 7, [0.5]) == ["late"]
    async with open_buffer(store, clock) as buffer:
        entry = buffer.get("run-1")
        assert await fill(entry, 7, [None, 1.0, 0.0, 1.0, 0.0]) == ["late", *["member"] * 4]
        assert states(entry) == {(7, 0): "discarded: timed_out", (7, 1): "open"}
        assert len((await take(entry)).rows) == 4
        check_books(entry)


async def test_repeats_of_a_group_that_closed_short_come_before_its_stragglers(
    store: Store, clock: ManualClock
) -> None:
    """Its process was restarted: the new one makes the whole group again, for which it is too late."""
    async with open_buffer(store, clock) as buffer:
        entry = await buffer.add(make_run(group_size=4))
        await fill(entry, 7, [0.0, 1.0])
        await expect_repeats(entry.buffer)
        clock.advance(301)
        await buffer.tick()
        assert await fill(entry, 7, [0.5] * 5) == ["surplus", "surplus", "late", "late", "member"]


async def test_late_samples_stay_in_the_store_with_their_bodies(store: Store, clock: ManualClock) -> None:
    async with open_buffer(store, clock) as buffer:
        entry = await buffer.add(make_run(group_size=4))
        await fill(entry, 7, [0.0])
        clock.advance(301)
        await buffer.tick()
        late = await write(entry, instance_id=7, uid="late")
        (group,) = entry.buffer.groups.by_id
        stored = await store.samples("run-1", group)
        assert [(s.row.outcome, s.row.uid) for s in stored][1:] == [("late", late.uid)]
        (body,) = await store.read([stored[1].location])
        assert b'"late"' in body


async def test_group_of_failed_samples_is_discarded_without_asking_a_hook(store: Store) -> None:
    async with open_buffer(store) as buffer:
        entry = await buffer.add(make_run())
        await fill(entry, 7, [None, None])
        assert await read(entry) is None
        assert states(entry) == {(7, 0): "discarded: failed"}


async def test_too_few_items_after_the_filter_end_a_group(store: Store) -> None:
    async with open_buffer(store) as buffer:
        entry = await buffer.add(make_run(group_size=4))
        await fill(entry, 7, [0.0, 5.0, None, None])
        assert await read(entry) is None
        assert states(entry) == {(7, 0): "discarded: filtered"}, "one of at least two items is left"


async def test_refused_announcement_opens_no_group(store: Store) -> None:
    async with open_buffer(store) as buffer:
        entry = await buffer.add(make_run(max_buffer_size=1))
        await fill(entry, 1, [0.0])
        with pytest.raises(BufferFull):
            await announce(entry.buffer, [(2, 0), (3, 0)])
        assert list(states(entry)) == [(1, 0)]


async def test_memory_of_a_group_is_given_back_when_it_is_over(store: Store) -> None:
    async with open_buffer(store) as buffer:
        entry = await buffer.add(make_run())
        await fill(entry, 1, [0.0, 1.0])
        await fill(entry, 2, [None, None])
        await take(entry)
        for group in entry.buffer.groups.by_id.values():
            assert (group.samples, group.slots, group.staged) == ([], set(), None)
        assert entry.buffer.groups.num_live_bytes == 0
        await store.load_runs()  # after which everything before it is on the disk
        await turns()
        assert not entry.delivery.leases.held


def test_only_the_transitions_of_the_table_are_allowed() -> None:
    for source in GroupState:
        for target in GroupState:
            if target in TRANSITIONS[source]:
                check_transition(source, target)
            else:
                with pytest.raises(ValueError, match=f"from {source} to {target}"):
                    check_transition(source, target)
