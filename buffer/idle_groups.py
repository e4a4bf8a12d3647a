"""A run process's reports on its groups: which have a rollout in flight, and which are idle and do not age meanwhile.

If a process is silent for ``QUIET_S``, or has ended, its idle groups age like all others. So every group ends in
finite time whatever happens to the process.
"""

from collections.abc import Iterable, Sequence

from forebay.buffer.groups.sample_group import SampleGroup
from forebay.buffer.run_buffer import RunBuffer
from forebay.core.group import GroupState
from forebay.core.ids import InstanceId, group_id
from forebay.core.records.rows import TickRow

QUIET_S = 180.0
"""How long a process with idle groups may be silent, in active seconds of its run; it reports every minute."""

Keys = Sequence[tuple[InstanceId, int]]
"""Groups by instance and epoch."""


async def note_groups(buffer: RunBuffer, idle: Keys, busy: Keys) -> None:
    """Apply a report of the process: ``idle`` groups have no rollout in flight from now on, ``busy`` ones have one.

    Groups that are not named or not open are unchanged. Raises ``StorageFailed``.
    """
    buffer.check_storage()
    now_s, groups = buffer.active.now_s(), buffer.groups
    changed = _hear(buffer)
    changed |= {group.group_id: group for group in _known(buffer, idle) if groups.set_idle(group, now_s)}
    changed |= {group.group_id: group for group in _known(buffer, busy) if groups.set_busy(group, now_s)}
    await _record(buffer, changed)


async def note_new_process(buffer: RunBuffer) -> None:
    """Mark all groups idle for a new process, until it announces them or reports them as busy.

    Raises ``StorageFailed``.
    """
    buffer.check_storage()
    now_s, groups = buffer.active.now_s(), buffer.groups
    changed = _hear(buffer)
    for group in groups.by_id.values():
        if groups.set_idle(group, now_s):
            changed[group.group_id] = group
    await _record(buffer, changed)


def idle_until_s(buffer: RunBuffer) -> float:
    """Until when the groups that are idle now do not age, if their process stays silent."""
    heard_until_s, ended_s = buffer.heard_s + QUIET_S, buffer.run.process_ended_s
    return heard_until_s if ended_s is None else min(heard_until_s, ended_s)


def oldest_age_s(buffer: RunBuffer) -> float:
    """Age of the oldest open group, as its deadline counts it; 0 without one."""
    if not buffer.groups.is_any(GroupState.OPEN):
        return 0.0
    now_s, until_s = buffer.active.now_s(), idle_until_s(buffer)
    open_groups = buffer.groups.in_state(GroupState.OPEN)
    return max((group.age_s(now_s, until_s) for group in open_groups), default=0.0)


def _hear(buffer: RunBuffer) -> dict[str, SampleGroup]:
    """Note a report of the process; return the idle groups that had begun to age because of its silence."""
    now_s, until_s = buffer.active.now_s(), idle_until_s(buffer)
    buffer.heard_s = now_s
    aged = dict(buffer.groups.idle) if now_s > until_s else {}
    for group in aged.values():
        buffer.groups.set_busy(group, until_s)
        buffer.groups.set_idle(group, now_s)
    return aged


def _known(buffer: RunBuffer, keys: Keys) -> Iterable[SampleGroup]:
    found = (buffer.groups.by_id.get(group_id(*key)) for key in keys)
    return (group for group in found if group is not None)


async def _record(buffer: RunBuffer, changed: dict[str, SampleGroup]) -> None:
    if changed:
        # With the time, so that time lost in a crash is not counted for groups that did not age.
        tick = TickRow(run_id=buffer.run.run_id, active_s=buffer.active.now_s())
        await buffer.record(tick, *(group.row for group in changed.values()))
