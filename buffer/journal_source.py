"""A run of this buffer as a recording, read from the store."""

from collections.abc import Mapping, Sequence
from typing import Any

from forebay.buffer.store.abc import Store
from forebay.core.records.recording_rows import RecordedRun
from forebay.core.records.rows import BatchRow, GroupRow, StoredSample
from forebay.core.run import Run
from forebay.replay.source import Source

SECRETS = frozenset({"api_key", "run_key"})
"""Payload fields that are never included in a recording."""


class JournalSource(Source):
    """A run of the journal. Each answer reflects the time of the call."""

    def __init__(self, run: Run, store: Store) -> None:
        self._store = store
        self._run = _recorded_run(run)

    @property
    def run(self) -> RecordedRun:
        """The recorded run."""
        return self._run

    async def groups(self) -> Sequence[GroupRow]:
        """All groups, in the order in which they opened."""
        return await self._store.load_groups(self._run.run_id)

    async def batches(self) -> Sequence[BatchRow]:
        """All batches, by number."""
        return await self._store.load_batches(self._run.run_id)

    async def samples(self, group_ids: Sequence[str]) -> Mapping[str, Sequence[StoredSample]]:
        """All samples that name each group, in order of arrival, by group."""
        found = await self._store.samples_of(self._run.run_id, group_ids)
        return {key: [each for each in samples if each.row.is_sample] for key, samples in found.items()}

    def has_body(self, sample: StoredSample) -> bool:
        """Whether the sample's segment exists."""
        return self._store.holds(sample.location)

    async def bodies(self, samples: Sequence[StoredSample]) -> Sequence[bytes]:
        """Stored bodies of ``samples``. Raises ``StorageFailed``."""
        return await self._store.read([each.location for each in samples])


def _recorded_run(run: Run) -> RecordedRun:
    return RecordedRun(
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
