"""Taking over a run's stored groups and samples, at start and after a failed write."""

from collections.abc import Container, Iterable
from typing import Any

from forebay.buffer.groups import Sample
from forebay.buffer.run_buffer import RunBuffer
from forebay.buffer.store.abc import Store
from forebay.buffer.store.rows import StoredSample
from forebay.core.group import GroupState


async def load_run(buffer: RunBuffer, store: Store, kept_batches: Container[str] = ()) -> None:
    """Fill an empty ``RunBuffer``. The samples of ``kept_batches`` are on their way out, and not in its window."""
    run_id, groups = buffer.run.run_id, buffer.groups
    groups.restore(await store.load_groups(run_id))
    for stored in await store.load_samples(run_id):
        sample = to_sample(stored)
        group = groups.by_id[stored.row.group_id]
        groups.restore_sample(stored.row.group_id, sample, stored.row.at_s)
        if group.row.batch_id not in kept_batches:
            buffer.window.add(group, sample)
    buffer.uids.update(await store.load_uids(run_id))
    buffer.last_sample_s = max((g.row.last_sample_s or 0.0 for g in groups.by_id.values()), default=0.0)
    groups.schedule_all(buffer.run.process_ended_s)


def give_back_leases(buffer: RunBuffer, kept_batches: Container[str] = ()) -> None:
    """Make groups ready again whose batch is not among ``kept_batches``, and report again what it reported."""
    leased = [g for g in buffer.groups.in_state(GroupState.LEASED) if g.row.batch_id not in kept_batches]
    lost_batches = {group.row.batch_id for group in leased}
    changed: list[Any] = []
    for group in leased:
        group.row.is_reported, group.row.batch_id = False, ""
        buffer.groups.move(group, GroupState.READY, buffer.active.now_s())
        changed.append(group.row)
    for group in buffer.groups.in_state(GroupState.DISCARDED):
        if group.row.batch_id in lost_batches:
            group.row.is_reported, group.row.batch_id = False, ""
            buffer.groups.unreported[group.group_id] = group
            changed.append(group.row)
    if changed:
        buffer.record(*changed)


def to_sample(stored: StoredSample) -> Sample:
    """The sample in memory of a stored one."""
    row = stored.row
    span = (row.reward_start, row.reward_end) if row.reward_end else None
    return Sample(row.uid, row.slot, row.reward, stored.location.length, span, stored.location)


def members(stored: Iterable[StoredSample]) -> list[Sample]:
    """Those of a group's stored samples that are in it."""
    return [to_sample(sample) for sample in stored if sample.row.outcome == "member"]
