"""A write: whether there is room for a sample, where it belongs, and when its writer is answered.

The first rule that applies decides. A known uid is a duplicate (``evicted_rows.py`` says how long uids are known).
Samples of an ended run are late. A full buffer accepts only samples of open groups. Otherwise the sample joins its
group (member), or none (late, surplus). Everything is decided in memory at once, and answered when the disk has it.
"""

from asyncio import Future, get_running_loop
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any

import msgspec

from forebay.buffer.groups.groups import Groups
from forebay.buffer.groups.sample_group import Sample, SampleGroup
from forebay.buffer.run_buffer import AHEAD, RunBuffer
from forebay.buffer.run_warnings import MANY_REWARD_PARTS, note_sample, warn
from forebay.buffer.same_uid import distinct_uid
from forebay.core.backoff import Deadline
from forebay.core.binary_sample import head_of
from forebay.core.errors import BufferFull, RunEnded, StorageFailed
from forebay.core.group import LIVE, GroupState
from forebay.core.ids import InstanceId, group_id
from forebay.core.outcome import note_parts
from forebay.core.records.rows import GroupRow, Location, Outcome, Row, SampleRow, part_row
from forebay.core.sample import Incoming
from forebay.core.waiting import finish


@dataclass(slots=True)
class Receipt:
    """The outcome of a sample, final once ``stored`` completes. That raises ``StorageFailed``."""

    uid: str
    outcome: Outcome
    is_failed: bool
    stored: "Future[Any]"
    is_duplicate: bool = False
    """Whether the uid was known; then only the store has the first sample's outcome."""
    row: SampleRow | None = None
    """The stored row; None for a duplicate."""


class Placement(msgspec.Struct, frozen=True):
    """Where a sample belongs."""

    group: SampleGroup
    slot: int
    outcome: Outcome
    is_group_changed: bool = False
    """Whether the group's row changed and must be stored with the sample."""


Place = Callable[[Groups, Incoming, float], Placement]
"""Decides where a sample belongs, given the run's active seconds."""


def write(buffer: RunBuffer, sample: Incoming, decide: Place | None = None) -> Receipt:
    """Accept a sample whose place memory knows (``evicted_rows``). ``decide`` replaces ``place``.

    Raises ``BufferFull`` when it needs a new group and the buffer has no room, ``StorageFailed``.
    """
    if buffer.has_failed:
        raise StorageFailed(AHEAD)
    if sample.uid in buffer.uids:
        return _write_duplicate(buffer, sample)
    buffer.store.check_room()  # first, or memory would be ahead of the disk
    note_sample(buffer.run, sample)
    now_s = buffer.active.now_s()
    if buffer.run.has_ended:
        late = buffer.groups.new_row(sample.instance_id, sample.epoch or 0, now_s)
        slot = -1 if sample.slot is None else sample.slot
        return _store(buffer, sample, _row(buffer, sample, late, slot, "late", now_s))
    # After duplicates, which take no room, and before a group is opened.
    check_room(buffer, sample.instance_id, sample.epoch, now_s)
    placement = (decide or place)(buffer.groups, sample, now_s)
    group = placement.group.row
    row = _row(buffer, sample, group, placement.slot, placement.outcome, now_s)
    kept: Sample | None = None
    if placement.outcome == "member":
        kept = Sample(row, None, sample.body, head_of(sample.body))
        # Added to its group at once: a group may be full, judged and leased before the disk has its last sample.
        buffer.groups.add(placement.group, kept, now_s)
        placement.group.last_sample_at_s = monotonic()
        buffer.window.add(placement.group, kept)
    buffer.last_sample_s = buffer.last_progress_s = now_s
    buffer.is_stalled = False
    receipt = _store(buffer, sample, row, kept, [group] if placement.is_group_changed else [])
    buffer.news.notify()
    return receipt


async def write_when_room(buffer: RunBuffer, sample: Incoming, wait_s: float) -> Receipt:
    """Write a sample for slime's routes: looks up what memory lacks, and waits up to ``wait_s`` seconds for room.

    Without an epoch, the same uid with a different body is a new sample. Raises ``BufferFull`` after ``wait_s``.
    """
    deadline: Deadline | None = None
    while True:
        if not buffer.gone.knows(sample.instance_id, sample.epoch):
            await buffer.gone.look_up([(sample.instance_id, sample.epoch)])
        if sample.epoch is None:
            sample.uid = await distinct_uid(buffer, sample)
        try:
            return write(buffer, sample)
        except BufferFull:
            deadline = deadline or Deadline(wait_s)
            # Each change wakes all waiters in order of arrival, so the first ones take the room.
            if not await deadline.wait(buffer.news):
                raise


async def announce(buffer: RunBuffer, opened: Sequence[tuple[InstanceId, int]]) -> None:
    """Open groups before their first sample, so that their deadlines count; existing ones age again.

    Raises ``BufferFull``, ``RunEnded``.
    """
    await buffer.gone.look_up(opened)
    buffer.check_storage()
    buffer.store.check_room()
    if buffer.run.has_ended:
        raise RunEnded(buffer.run.run_id, buffer.run.reason or buffer.run.state.value)
    now_s = buffer.active.now_s()
    rows: list[GroupRow] = []
    again: list[GroupRow] = []
    for instance_id, epoch in opened:
        known = buffer.groups.by_id.get(group_id(instance_id, epoch))
        if known is None:
            if not rows:  # an announced group takes no room, so one check covers all
                check_room(buffer, instance_id, epoch, now_s)
            rows.append(buffer.groups.open(instance_id, epoch, now_s).row)
            buffer.uids.learn(group_id(instance_id, epoch), ())
        elif buffer.groups.set_busy(known, now_s):  # a new process continues it
            again.append(known.row)
    if rows:
        buffer.last_progress_s, buffer.is_stalled = now_s, False
    if rows or again:
        await buffer.record(*rows, *again)


# --- storing


def _store(
    buffer: RunBuffer, sample: Incoming, row: SampleRow, kept: Sample | None = None, changed: Sequence[Row] = ()
) -> Receipt:
    """Store a sample. ``kept`` is its copy in memory, with its body until that is stored; ``changed`` goes with it."""
    uid, key, outcome, is_failed, counts = row.uid, row.group_id, row.outcome, row.reward is None, buffer.counts
    # Before the disk has it, because the same uid may arrive again in the same turn of the loop.
    buffer.uids.add(uid, key)
    if kept is None and key not in buffer.groups.by_id:
        buffer.uids.mark_done(key)
    counts["bytes"] += len(sample.body)
    buffer.outcomes[sample.outcome] += not sample.fork
    counts["failed" if is_failed and outcome == "member" else outcome] += 1
    if row.reward is not None and outcome == "member" and not row.fork:
        buffer.rewards.note(row.reward)
        if row.reward_parts and note_parts(buffer.run.reward_parts, row.reward_parts):
            warn(buffer.run, MANY_REWARD_PARTS)
    if buffer.run.has_ended:
        changed = buffer.run_rows()
    if outcome == "member":  # no reader is given the others
        store_parts(buffer, sample.parts, row)
    # Pending before it is submitted, because a store without a disk completes at once.
    buffer.pending[uid] = stored = get_running_loop().create_future()
    buffer.store.submit([row, *changed], sample.body, partial(_store_done, buffer, uid, stored, kept))
    return Receipt(uid, outcome, is_failed, stored, row=row)


def store_parts(buffer: RunBuffer, parts: Mapping[str, bytes | memoryview], row: SampleRow) -> None:
    """Store the parts of a sample or note that its group lacks. The disk has them before ``row``, stored next."""
    group = buffer.groups.by_id.get(row.group_id)
    for digest, part in parts.items():
        if group is not None and digest in group.parts:
            continue
        if group is not None and group.state in LIVE:
            buffer.groups.add_part(row.group_id, digest, len(part))
        buffer.record(part_row(row, digest), body=part)
        buffer.check_storage()


def _store_done(
    buffer: RunBuffer,
    uid: str,
    stored: "Future[None]",
    kept: Sample | None,
    location: Location | None,
    error: StorageFailed | None,
) -> None:
    """Called by the store, in the loop's thread and in the order of the writes."""
    del buffer.pending[uid]
    if error is not None:
        buffer.fail()
    elif kept is not None:
        # Not earlier: until the disk has the body, a read takes it from memory.
        kept.location, kept.body = location, None
    finish(stored, None, error)


def _row(buffer: RunBuffer, sample: Incoming, group: GroupRow, slot: int, outcome: Outcome, now_s: float) -> SampleRow:
    start, end = sample.reward_span or (0, 0)
    return SampleRow(
        run_id=buffer.run.run_id,
        uid=sample.uid,
        # The group's own object: its samples share one in memory.
        instance_id=group.instance_id,
        group_id=group.group_id,
        epoch=group.epoch,
        slot=slot,
        outcome=outcome,
        reward=sample.reward,
        at_s=now_s,
        received_at_s=buffer.wall(),
        error=sample.error,
        reward_start=start,
        reward_end=end,
        rollout_id=sample.rollout_id,
        oldest_version=sample.oldest_version,
        group_number=group.number,
        fork=sample.fork,
        rollout_outcome=sample.outcome.value,
        is_foreign=sample.is_foreign,
        num_tokens=sample.num_tokens,
        reward_parts=sample.reward_parts,
    )


# --- room


def check_room(buffer: RunBuffer, instance_id: InstanceId, epoch: int | None, now_s: float) -> None:
    """Raise ``BufferFull`` if a sample needs a new group and the buffer has no room for one."""
    groups, settings = buffer.groups, buffer.run.settings
    if groups.num_live_samples >= settings.max_buffer_size:
        what = f"{groups.num_live_samples} samples, max_buffer_size is {settings.max_buffer_size}"
    elif groups.num_live_bytes >= settings.max_buffer_bytes:
        what = f"{groups.num_live_bytes} bytes, max_buffer_bytes is {settings.max_buffer_bytes}"
    else:
        return
    # A sample of an open group is always accepted, however full the buffer: only complete groups ever free room.
    if epoch is not None:
        needs_group = group_id(instance_id, epoch) not in groups.by_id
    else:
        needs_group = _next_home(groups, groups.by_instance.get(instance_id, []), now_s) is None
    if needs_group:
        raise BufferFull(what)


# --- duplicates


def _write_duplicate(buffer: RunBuffer, sample: Incoming) -> Receipt:
    """Acknowledge and ignore a known uid, once the disk has the first sample."""
    buffer.counts["duplicate"] += 1
    # A restarted process has resent this one, so one surplus sample fewer is due.
    for group in buffer.groups.by_instance.get(sample.instance_id, ()):
        if sample.uid in group.repeats and group.row.surplus_due > 0:
            group.repeats.discard(sample.uid)
            group.row.surplus_due -= 1
            buffer.record(group.row)
            break
    stored = buffer.pending.get(sample.uid)
    if stored is None:
        # The disk has the first already.
        stored = get_running_loop().create_future()
        stored.set_result(None)
    return Receipt(sample.uid, "member", is_failed=False, stored=stored, is_duplicate=True)


async def expect_repeats(buffer: RunBuffer) -> None:
    """Prepare for a restarted generator without slots: it resends the samples of incomplete groups.

    Those with the same uid are duplicates; of the others, that number is surplus.
    """
    changed: list[GroupRow] = []
    groups = buffer.groups
    for group in groups.by_id.values():
        is_incomplete = group.state is GroupState.OPEN and not groups.is_full(group)
        group.repeats = {sample.row.uid for sample in group.samples if not sample.row.fork} if is_incomplete else set()
        if group.row.surplus_due != len(group.repeats):
            # Samples get new uids if the generator draws them at random, so only their number counts.
            group.row.surplus_due = len(group.repeats)
            changed.append(group.row)
    if changed:
        await buffer.record(*changed)


# --- where a sample belongs


def place(groups: Groups, sample: Incoming, now_s: float) -> Placement:
    """Decide where a sample belongs, opening a group if needed."""
    if sample.epoch is None:
        return _place_next(groups, sample.instance_id, now_s)
    return _place_at(groups, sample, sample.epoch, now_s)


def _place_at(groups: Groups, sample: Incoming, epoch: int, now_s: float) -> Placement:
    """Place a sample with an epoch, and mostly a slot, which decide."""
    slot, size = sample.slot, groups.settings.group_size
    if slot is not None and slot >= size and group_id(sample.instance_id, epoch) not in groups.by_id:
        # A sample that fits no group opens none.
        return Placement(SampleGroup(groups.new_row(sample.instance_id, epoch, now_s)), slot, "surplus")
    group = groups.open(sample.instance_id, epoch, now_s)
    if group.state is not GroupState.OPEN:
        return Placement(group, -1 if slot is None else slot, "late")
    if slot is None:
        slot = group.free_slot()
    if slot >= size:
        return Placement(group, slot, "surplus")
    if sample.fork:
        # A fork shares its slot with the main sample of its rollout, whichever arrives first.
        mains = (other.row for other in group.samples if other.row.slot == slot and not other.row.fork)
        is_of_another = any(main.rollout_id != sample.rollout_id for main in mains)
        return Placement(group, slot, "surplus" if is_of_another else "member")
    is_taken = groups.is_full(group) or group.filled[slot : slot + 1] == b"\1"
    return Placement(group, slot, "surplus" if is_taken else "member")


def _place_next(groups: Groups, instance_id: InstanceId, now_s: float) -> Placement:
    """Place a sample without an epoch: such samples fill one group after another."""
    known = groups.by_instance.get(instance_id, [])
    home = _next_home(groups, known, now_s)
    if home is None:
        epoch = max((group.row.epoch + 1 for group in known), default=groups.first_epochs[instance_id])
        home = groups.open(instance_id, epoch, now_s)
    if home.state is GroupState.OPEN and not groups.is_full(home):
        return Placement(home, home.free_slot(), "member")
    if home.row.surplus_due > 0:
        home.row.surplus_due -= 1
        return Placement(home, -1, "surplus", is_group_changed=True)
    home.row.num_stragglers += 1
    return Placement(home, -1, "late", is_group_changed=True)


def _next_home(groups: Groups, known: Sequence[SampleGroup], now_s: float) -> SampleGroup | None:
    """The group for the next sample of a writer without epochs; None if a new one must open."""
    for group in known:
        if group.state is GroupState.OPEN and not groups.is_full(group):
            return group
    for group in known:
        if group.row.surplus_due > 0:
            return group
    return known[-1] if known and _awaits_straggler(groups, known[-1].row, now_s) else None


def _awaits_straggler(groups: Groups, row: GroupRow, now_s: float) -> bool:
    """Whether a sample may belong to this group, which closed incomplete, instead of starting the next epoch.

    Each empty slot awaits one sample for a while. Further samples belong to another pass over the input.
    """
    settings = groups.settings
    if row.closed_s is None or now_s - row.closed_s > settings.group_timeout_seconds:
        return False
    return row.num_samples + row.num_stragglers < settings.group_size
