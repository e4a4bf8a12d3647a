"""Checkpoints of the trainer: which batches each holds, and rewinding to one."""

from collections.abc import Iterable, Sequence

from forebay.buffer.batches import RewoundRows
from forebay.buffer.groups.sample_group import Sample, SampleGroup
from forebay.buffer.leases.leases import Leases
from forebay.buffer.restore import read_back
from forebay.core.errors import BodiesGone
from forebay.core.records.rows import BatchRow, Row


async def checkpoint(leases: Leases, step: int, batch_ids: Sequence[str] | None) -> list[BatchRow]:
    """Fix batches to the checkpoint of ``step`` and acknowledge them, all or none; return all batches in it.

    Without ``batch_ids``, fixes the acknowledged batches that no checkpoint holds. A run's first checkpoint also
    holds what no rewind can undo. Raises ``BatchNotFound``, ``LeaseLost``, ``CheckpointConflict``, ``StorageFailed``.
    """
    buffer = leases.buffer
    # Nothing in memory may be evicted before the answer is made.
    with buffer.gone.nothing_forgotten():
        if buffer.batches.uses_checkpoints and buffer.batches.has_at_hand(step):
            return await _fix(leases, step, batch_ids)
        async with buffer.gone.everything():
            return await _fix(leases, step, batch_ids)


async def _fix(leases: Leases, step: int, batch_ids: Sequence[str] | None) -> list[BatchRow]:
    buffer = leases.buffer
    if batch_ids is None:
        batch_ids = [row.batch_id for row in buffer.batches.in_checkpoint(None)]
    spent = [] if buffer.batches.uses_checkpoints else await _spent(leases, batch_ids)
    # Everything is checked before anything changes, so that all batches are fixed or none.
    async with leases.steady([*batch_ids, *spent]) as rows:
        buffer.check_storage()  # a recovery would have replaced what was looked up above
        for row in rows:
            leases.check(row)
        buffer.batches.check_fixable(rows, step)
        # A trainer that reports a checkpoint has trained on its batches, acknowledged or not.
        changed = [changed for row in rows for changed in leases.acknowledge(row)]
        fixed = buffer.batches.fix(rows, step, buffer.wall(), buffer.run.weight_version)
        await buffer.record(*changed, fixed)
    return buffer.batches.in_checkpoint(step)


async def _spent(leases: Leases, named: Iterable[str]) -> list[str]:
    """Find acknowledged batches, not ``named``, whose bodies retention removed: no rewind can undo them.

    Retention does so as long as the run has no checkpoint. All other batches are complete when this returns.
    """
    buffer, others, gone = leases.buffer, set(named), set[str]()

    def batches() -> list[BatchRow]:
        return [row for row in buffer.batches.in_checkpoint(None) if row.batch_id not in others]

    def wanted() -> list[SampleGroup]:
        return [group for row in batches() for group in leases.groups_of(row) if group.group_id not in gone]

    while True:
        try:
            await read_back(buffer, wanted)
        except BodiesGone as error:
            # Retried without them: the next attempt may find more missing.
            gone.update(error.group_ids)
        else:
            return [row.batch_id for row in batches() if gone.intersection(row.group_ids)]


async def rewind(leases: Leases, step: int | None) -> RewoundRows:
    """Undo every batch that no checkpoint up to ``step`` holds, and forget the later checkpoints; None undoes all.

    Groups become ready in their old order, and groups that ended undelivered are reported again. The weight version
    becomes that of the checkpoint, which makes none of them stale, until the trainer announces what it has loaded.
    No new step begins: the engines keep their weights, and what they generated with them is kept. Raises
    ``CheckpointNotFound``, ``BodiesGone``, ``StorageFailed``.
    """
    buffer = leases.buffer
    async with buffer.lock, buffer.gone.everything():
        buffer.check_storage()
        # Read before anything changes. `after` is called again below because an ack may have arrived meanwhile.
        lost = await _read_back(leases, step)
        undone = buffer.batches.after(step)
        changed: list[Row] = []
        for row in undone.batches:
            changed += leases.take_back(row, lost, may_be_known=True)
        place = "before the first checkpoint" if step is None else f"the checkpoint of step {step}"
        buffer.run.weight_version = buffer.batches.weight_version(step)
        buffer.batches.undo(undone, f"a rewind to {place} revoked it")
        await buffer.record(*changed, *undone.batches, *undone.checkpoints, *buffer.run_rows())
    buffer.news.notify()
    return undone


async def _read_back(leases: Leases, step: int | None) -> dict[str, list[Sample]]:
    batches = leases.buffer.batches

    def wanted() -> list[SampleGroup]:
        rows = batches.after(step).batches
        return [g for row in rows for g in leases.groups_of(row) if g.row.batch_id == row.batch_id]

    try:
        return await read_back(leases.buffer, wanted)
    except BodiesGone as gone:
        raise BodiesGone(gone.group_ids, hint=_what_is_left(leases, gone.group_ids)) from None


def _what_is_left(leases: Leases, gone: Sequence[str]) -> str:
    groups, batches = leases.buffer.groups.by_id, leases.buffer.batches
    holders = {batches.by_id[groups[group_id].row.batch_id].checkpoint_step for group_id in gone}
    newest = max((step for step in holders if step is not None), default=None)
    if newest is None or None in holders:
        return "no checkpoint can be rewound to any more; start another run"
    return f"the earliest checkpoint to rewind to is that of step {newest}; raise keep_checkpoints to keep more"
