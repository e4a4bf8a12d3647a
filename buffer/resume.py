"""Finds the run that a trainer's list of finished ids belongs to, and decides about its groups.

All groups of the run are examined, so keep them in memory meanwhile (``buffer.gone.everything()``).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from forebay.buffer.batches import Batches
from forebay.buffer.groups.groups import Groups
from forebay.buffer.groups.sample_group import Sample, SampleGroup
from forebay.buffer.leases.leases import Leases
from forebay.buffer.restore import read_back
from forebay.buffer.run_buffer import RunBuffer
from forebay.core.group import GroupState
from forebay.core.ids import InstanceId
from forebay.core.records.rows import BatchRow


@dataclass(slots=True)
class Reconciliation:
    """The changes that make a resumed run match the list from its trainer."""

    ack: list[SampleGroup] = field(default_factory=list)
    """Listed groups whose batch is leased."""
    known: list[SampleGroup] = field(default_factory=list)
    """Listed groups that are ready again: a reply with them arrived but was revoked, or its lease expired."""
    redeliver: list[SampleGroup] = field(default_factory=list)
    """Delivered groups that are not in the list, because the trainer lost them."""
    report_again: list[SampleGroup] = field(default_factory=list)
    """Groups that ended undelivered and must be reported again."""
    known_undelivered: list[SampleGroup] = field(default_factory=list)
    """Groups that ended undelivered but need no further report: their revoked reply had arrived."""
    base_skip: list[InstanceId] = field(default_factory=list)
    """Listed ids that belong to no group of this run; the next process skips them."""

    @property
    def changed(self) -> list[SampleGroup]:
        """Every group whose row changes."""
        return [*self.ack, *self.known, *self.redeliver, *self.report_again, *self.known_undelivered]


def covers(buffer: RunBuffer, listed: Sequence[InstanceId]) -> bool:
    """Whether the run reported each listed id, or was started with it, with at least the listed multiplicity."""
    known = Counter(buffer.run.start.first_listed)
    rows = (group.row for group in buffer.groups.by_id.values())
    known.update(row.instance_id for row in rows if row.is_reported or row.may_be_known)
    return all(known[instance_id] >= count for instance_id, count in Counter(listed).items())


def num_beyond(buffer: RunBuffer, listed: Sequence[InstanceId]) -> int:
    """Number of ids that the run reported, or was started with, but that are not listed: what the trainer lost.

    Ids that the trainer may have received, but whose batch it no longer has, are not counted: it need not have them.
    """
    known = Counter(buffer.run.start.first_listed)
    known.update(group.row.instance_id for group in buffer.groups.by_id.values() if group.row.is_reported)
    return (known - Counter(listed)).total()


async def skip_instance_ids(buffer: RunBuffer) -> list[InstanceId]:
    """Ids that another process of this run must not generate, as a multiset: groups that need no more samples."""
    groups = buffer.groups
    async with buffer.gone.everything():
        done = (g for g in groups.by_id.values() if g.state is not GroupState.OPEN or groups.is_full(g))
        return [*buffer.run.base_skip, *(group.instance_id for group in done)]


async def check_bodies(buffer: RunBuffer, listed: Sequence[InstanceId]) -> None:
    """Raise ``BodiesGone`` unless everything that ``reconcile`` would redeliver is stored."""
    async with buffer.gone.everything():
        await read_back(buffer, lambda: _decide(buffer, listed).redeliver)


async def reconcile(leases: Leases, listed: Sequence[InstanceId]) -> None:
    """Make a run match a trainer's list. Raises ``BodiesGone``, ``StorageFailed``.

    If anything is redelivered, the trainer may have an older model, so its weight version becomes unknown.
    """
    buffer, run = leases.buffer, leases.buffer.run
    async with buffer.lock, buffer.gone.everything():
        buffer.check_storage()
        lost = await read_back(buffer, lambda: _decide(buffer, listed).redeliver)
        # No await from here until the last change, because an ack must not come in between.
        leases.forget()
        result = _decide(buffer, listed)
        _apply(result, buffer.groups, lost, buffer.active.now_s())
        batches = buffer.batches.follow_resume({g.group_id for g in result.redeliver}, "its trainer resumed without it")
        batches += _book(result, buffer.batches, buffer.wall())
        if result.redeliver:
            run.weight_version = None
        run.start = run.start.skipping(result.base_skip)
        buffer.groups.adopt(run.settings, result.base_skip)
        run.has_delivered = False
        await buffer.record(*(group.row for group in result.changed), *batches, *buffer.run_rows())
    buffer.news.notify()


def _decide(buffer: RunBuffer, listed: Sequence[InstanceId]) -> Reconciliation:
    """Decide about every closed group of a run that ``covers`` the list.

    If the run's own start listed an id m times, its first m listings stand for epochs before this run. Further listings
    stand for the id's reported groups, in order of their reports. The rest stand for groups that the trainer may
    have received although it no longer has their batch.
    """
    groups, first_listed = buffer.groups, buffer.run.start.first_listed
    result = Reconciliation()
    remaining = Counter(listed)
    for instance_id, count in Counter(first_listed).items():
        own = min(count, remaining[instance_id])
        result.base_skip += [instance_id] * own
        remaining[instance_id] -= own
    for group in sorted(groups.by_id.values(), key=lambda g: (_batch_number(g.row.batch_id), g.row.closed_seq)):
        # Unknown to the trainer: it is unchanged, and is delivered or reported as usual.
        if not group.row.is_reported:
            continue
        is_listed = remaining[group.instance_id] > 0
        # The earliest reports count first, because the trainer's list has no order.
        remaining[group.instance_id] -= is_listed
        if group.state is GroupState.DISCARDED:
            if not is_listed:
                result.report_again.append(group)
        elif is_listed and group.state is not GroupState.ACKED:
            result.ack.append(group)
        elif not is_listed:
            result.redeliver.append(group)
    in_doubt = (g for g in groups.by_id.values() if g.row.may_be_known and not g.row.is_reported)
    for group in sorted(in_doubt, key=lambda g: g.row.closed_seq):
        if remaining[group.instance_id] > 0:
            remaining[group.instance_id] -= 1
            (result.known_undelivered if group.state is GroupState.DISCARDED else result.known).append(group)
    return result


def _apply(result: Reconciliation, groups: Groups, lost: Mapping[str, list[Sample]], now_s: float) -> None:
    """Apply the decisions to the groups; ``lost`` has the samples of redelivered groups."""
    for group in (*result.ack, *result.known):
        group.row.is_reported = True
        groups.move(group, GroupState.ACKED, now_s)
    for group in result.redeliver:
        if group.state is GroupState.ACKED:
            # Samples of an acknowledged group are not in memory; the caller has read them back.
            groups.revive(group, lost[group.group_id])
        group.row.is_reported, group.row.batch_id = False, ""
        groups.move(group, GroupState.READY, now_s)
    for group in result.report_again:
        group.row.is_reported, group.row.batch_id = False, ""
        groups.unreported[group.group_id] = group
    for group in result.known_undelivered:
        group.row.is_reported = True
        groups.unreported.pop(group.group_id, None)
        groups.done.append(group.group_id)
    for group in result.changed:
        group.row.may_be_known = False


def _book(result: Reconciliation, batches: Batches, at_s: float) -> list[BatchRow]:
    """Make a batch of what the trainer received according to its list, so that checkpoints and rewinds include it."""
    if not (result.known or result.known_undelivered):
        return []
    known = sorted(result.known, key=lambda group: group.row.order)
    num_rows = sum(group.num_completed for group in known)
    row = batches.add_acked([g.group_id for g in known], [g.group_id for g in result.known_undelivered], num_rows, at_s)
    for group in (*known, *result.known_undelivered):
        group.row.batch_id = row.batch_id
    return [row]


def _batch_number(batch_id: str) -> int:
    """Number of a batch within its run, 0 for none."""
    number = batch_id.removeprefix("batch-").partition("-")[0]
    return int(number) if number.isdecimal() else 0
