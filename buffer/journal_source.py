"""A run of this buffer as a recording: what the store has of it, in the words of ``replay.model``."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from forebay.buffer.store.abc import Store
from forebay.core.records.rows import BatchRow, GroupRow, Location, StoredSample
from forebay.core.run import Run
from forebay.replay.model import BatchRecord, GroupRecord, RunRecord, SampleRecord
from forebay.replay.source import Source

SECRETS = frozenset({"api_key", "run_key"})
"""Fields of a payload that no recording has."""


class JournalSource(Source):
    """A run of the journal. What it answers is of the moment in which it is asked."""

    def __init__(self, run: Run, store: Store) -> None:
        self._store = store
        self._run = _run_record(run)

    @property
    def run(self) -> RunRecord:
        """What it is a recording of."""
        return self._run

    async def groups(self) -> Sequence[GroupRecord]:
        """Every group, in the order in which they opened."""
        rows = await self._store.load_groups(self._run.run_id)
        # A hundred thousand take a third of a second.
        return await asyncio.to_thread(lambda: [_group_record(row) for row in rows])

    async def batches(self) -> Sequence[BatchRecord]:
        """Every batch, by its number."""
        return [_batch_record(row) for row in await self._store.load_batches(self._run.run_id)]

    async def samples(self, group_ids: Sequence[str]) -> Mapping[str, Sequence[SampleRecord]]:
        """By group, all that name it, in the order in which they came."""
        found = await self._store.samples_of(self._run.run_id, group_ids)
        return {group_id: [sample_record(each) for each in samples] for group_id, samples in found.items()}

    def has_body(self, sample: SampleRecord) -> bool:
        """Whether its segment is there."""
        return self._store.holds(Location(*sample.place))

    async def bodies(self, samples: Sequence[SampleRecord]) -> Sequence[bytes]:
        """Their bodies as they were stored. Raises ``StorageFailed``."""
        return await self._store.read([Location(*each.place) for each in samples])


def sample_record(stored: StoredSample) -> SampleRecord:
    """A stored sample in the words of a recording."""
    row, at = stored.row, stored.location
    return SampleRecord(
        uid=row.uid,
        instance_id=row.instance_id,
        group_id=row.group_id,
        epoch=row.epoch,
        slot=row.slot,
        became=row.outcome,
        reward=row.reward,
        at_s=row.at_s,
        error=row.error,
        reward_start=row.reward_start,
        reward_end=row.reward_end,
        rollout_id=row.rollout_id,
        oldest_version=row.oldest_version,
        fork=row.fork,
        rollout_outcome=row.rollout_outcome,
        is_foreign=row.is_foreign,
        place=(at.segment, at.offset, at.length),
    )


def _run_record(run: Run) -> RunRecord:
    return RunRecord(
        run_id=run.run_id,
        name=run.name,
        task_type=run.task_type,
        origin=run.origin,
        state=run.state.value,
        reason=run.reason,
        created_at_s=run.created_at_s,
        payload=_without_secrets(run.payload),
        generator_sha256=run.generator_sha256,
        generator_hooks=run.generator_hooks,
        generator_contract=run.generator_contract,
        input_sha256=run.input_sha256,
        weight_version=run.weight_version,
        generator_files=run.generator_files,
        num_groups_total=run.num_groups_total,
    )


def _without_secrets(payload: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in payload.items() if name not in SECRETS}


def _group_record(row: GroupRow) -> GroupRecord:
    return GroupRecord(
        group_id=row.group_id,
        instance_id=row.instance_id,
        epoch=row.epoch,
        number=row.number,
        order=row.order,
        closed_seq=row.closed_seq,
        state=row.state.value,
        reason=row.reason,
        is_salvaged=row.is_salvaged,
        opened_s=row.opened_s,
        closed_s=row.closed_s,
        num_samples=row.num_samples,
        num_failed=row.num_failed,
    )


def _batch_record(row: BatchRow) -> BatchRecord:
    return BatchRecord(
        batch_id=row.batch_id,
        number=row.number,
        state=row.state.value,
        group_ids=row.group_ids,
        step=row.step,
        checkpoint_step=row.checkpoint_step,
        is_self_acking=row.is_self_acking,
    )
