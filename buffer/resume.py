"""Which run a trainer's list of finished ids belongs to, and what becomes of its groups. Pure."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from forebay.buffer.groups import Group, Groups
from forebay.core.group import GroupState
from forebay.core.ids import InstanceId


@dataclass(slots=True)
class Reconciliation:
    """What a resumed run has to do to be exact with respect to the list that its trainer sent."""

    ack: list[Group] = field(default_factory=list)
    """Listed groups that were not yet counted as delivered."""
    redeliver: list[Group] = field(default_factory=list)
    """Delivered groups that the list does not have: the trainer lost them."""
    report: list[Group] = field(default_factory=list)
    """Groups that ended undelivered and must be told again."""
    base_skip: list[InstanceId] = field(default_factory=list)
    """Listed ids that belong to no group of this run; the next process skips them."""


def covers(groups: Groups, start_skip: Iterable[InstanceId], listed: Sequence[InstanceId]) -> bool:
    """Whether the run has reported every listed id, or was itself started with it, as often as it is listed."""
    known = Counter(start_skip)
    known.update(group.instance_id for group in groups.by_id.values() if group.row.is_reported)
    return all(known[instance_id] >= count for instance_id, count in Counter(listed).items())


def reconcile(groups: Groups, start_skip: Iterable[InstanceId], listed: Sequence[InstanceId]) -> Reconciliation:
    """Decide about every closed group of a run that ``covers`` the list.

    Of an id that the run's own start listed m times, the first m listings stand for epochs before this run; the others
    stand for the id's reported groups, in the order in which they were reported.
    """
    result = Reconciliation()
    remaining = Counter(listed)
    for instance_id, count in Counter(start_skip).items():
        own = min(count, remaining[instance_id])
        result.base_skip += [instance_id] * own
        remaining[instance_id] -= own
    for group in sorted(groups.by_id.values(), key=_order):
        if not group.row.is_reported:
            continue
        is_listed = remaining[group.instance_id] > 0
        remaining[group.instance_id] -= is_listed
        if group.state is GroupState.DISCARDED:
            if not is_listed:
                result.report.append(group)
        elif is_listed and group.state is not GroupState.ACKED:
            result.ack.append(group)
        elif not is_listed:
            result.redeliver.append(group)
    return result


def _order(group: Group) -> tuple[int, int]:
    return (batch_number(group.row.batch_id), group.row.closed_seq)


def batch_number(batch_id: str) -> int:
    """The place of a batch among those of its run, 0 for none."""
    number = batch_id.removeprefix("batch-").partition("-")[0]
    return int(number) if number.isdecimal() else 0


def held_instances(groups: Groups) -> list[InstanceId]:
    """The id of every group that needs no further samples, with multiplicity: another process must not generate it."""
    return [
        group.instance_id
        for group in groups.by_id.values()
        if group.state is not GroupState.OPEN or groups.is_full(group)
    ]
