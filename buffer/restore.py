"""Loads a run's stored groups and samples, at start and after a failed write."""

import asyncio
import gc
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from forebay.buffer.groups.meta_info import MetaWindow
from forebay.buffer.groups.sample_group import Sample, SampleGroup
from forebay.buffer.run_buffer import RunBuffer
from forebay.buffer.store.abc import Store
from forebay.core.errors import BodiesGone
from forebay.core.group import BatchState, GroupState
from forebay.core.records.rows import RunRow, StoredSample
from forebay.core.run import WORKING

ROWS_AT_A_TIME = 2_000
RUNS_AT_A_TIME = 32

ResultT = TypeVar("ResultT")


async def side_by_side(load: Callable[[RunRow], Awaitable[ResultT]], rows: Sequence[RunRow]) -> list[ResultT]:
    """Call ``load`` for every run, several at a time, so that the index answers their queries together."""
    loaded: list[ResultT] = []
    gc.disable()  # it would repeatedly scan thousands of runs and find no garbage
    try:
        for first in range(0, len(rows), RUNS_AT_A_TIME):
            loaded += await asyncio.gather(*map(load, rows[first : first + RUNS_AT_A_TIME]))
    finally:
        gc.enable()
    return loaded


async def load_run(buffer: RunBuffer, store: Store) -> dict[str, MetaWindow]:
    """Fill an empty ``RunBuffer``; return the samples of each leased batch, which are not in its window."""
    run_id, groups = buffer.run.run_id, buffer.groups
    await _load_batches(buffer, store)
    # A run with little stored data is loaded completely; of a larger one only what is needed.
    uids = await store.uids_by_group(run_id, buffer.gone.remembered_samples)
    after, last_sample_s = "", 0.0
    # In pages: rows of evicted groups must not fill the memory, not even for a moment.
    while page := await store.groups(run_id, after=after, limit=ROWS_AT_A_TIME):
        after = page[-1].group_id
        groups.restore(page, lambda row: uids is not None or not buffer.gone.may_go(row))
        last_sample_s = max((last_sample_s, *(row.last_sample_s or 0.0 for row in page)))
    windows = {row.batch_id: buffer.new_window() for row in buffer.batches.in_state(BatchState.LEASED)}
    for stored in await store.load_samples(run_id):
        sample = Sample(stored.row, stored.location)
        group = groups.restore_sample(sample)
        if sample.row.digest:
            continue
        # Leased samples were in their reply's meta info, unless the batch becomes ready again.
        windows.get(group.row.batch_id, buffer.window).add(group, sample)
    # Their oldest version follows from the samples, which are loaded only now.
    groups.restored()
    if buffer.run.is_fed and buffer.run.state in WORKING:
        # Readers never see part of a recorded group: the rest of it is about to be written.
        groups.hold_back_parts()
    # A resent sample is a duplicate even if its body has been removed.
    buffer.gone.restore(uids)
    live_s = (group.row.last_sample_s or 0.0 for group in groups.by_id.values())
    buffer.last_sample_s = max((last_sample_s, *live_s))
    return windows


async def _load_batches(buffer: RunBuffer, store: Store) -> None:
    run_id, batches, after = buffer.run.run_id, buffer.batches, 0
    batches.restore(await store.load_checkpoints(run_id))
    while page := await store.load_batches(run_id, after=after, limit=ROWS_AT_A_TIME):
        after = page[-1].number
        for row in page:
            batches.add(row)
        batches.forget_oldest(buffer.gone.remembered_samples)


async def read_back(buffer: RunBuffer, wanted: Callable[[], Iterable[SampleGroup]]) -> dict[str, list[Sample]]:
    """Read the samples of the acknowledged groups in ``wanted``. Raises ``BodiesGone``, ``StorageFailed``.

    All are read before anything changes. An ack meanwhile may add groups, and bodies may be moved, so ``wanted`` is
    called repeatedly. The caller must revive the groups before anything else happens, or their
    bodies may be removed.
    """
    store, lost = buffer.store, dict[str, list[Sample]]()

    def is_there(sample: Sample) -> bool:
        return sample.location is not None and store.holds(sample.location)

    while True:
        acked = [group.group_id for group in wanted() if group.state is GroupState.ACKED]
        missing = [key for key in acked if key not in lost or not all(map(is_there, lost[key]))]
        if not missing:
            return lost
        # During the removal of a segment, its bodies may be about to move.
        await store.wait_for_removals()
        found = await store.samples_of(buffer.run.run_id, missing)
        lost.update({group_id: members(samples) for group_id, samples in found.items()})
        locations = {key: [s.location for s in lost[key] if s.location is not None] for key in missing}
        gone = [key for key in missing if any(map(store.has_removed, locations[key]))]
        if gone:
            raise BodiesGone(gone)


def members(stored: Iterable[StoredSample]) -> list[Sample]:
    """Samples that are members of their group, and the group's parts, among its stored samples."""
    return [Sample(sample.row, sample.location) for sample in stored if sample.row.outcome in ("member", "part")]
