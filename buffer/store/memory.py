"""A store without a disk: for tests, and for runs whose data may be lost."""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Self

from msgspec.structs import astuple, replace

from forebay.buffer.store.abc import NEWEST_GROUPS, Done, GroupBodies, Segment, Store, StoreStats
from forebay.buffer.store.index_rows import implied_group
from forebay.buffer.store.log_segments import SEGMENT_BYTES
from forebay.core.errors import GroupNotFound, StorageFailed
from forebay.core.group import LIVE
from forebay.core.ids import InstanceId
from forebay.core.records.log_records import make_entry
from forebay.core.records.rows import (
    PART_PREFIX,
    REMOVED,
    BatchRow,
    CheckpointRow,
    FoundGroup,
    GroupRow,
    Location,
    Row,
    RunRow,
    SampleRow,
    StartRow,
    StoredSample,
    TickRow,
)


class MemoryStore(Store):
    """Keeps everything in dictionaries. Its contents survive leaving and re-entering it, but not the process."""

    def __init__(self, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        """Bodies are kept in segments of about ``segment_bytes``, so that they can be removed as in a journal."""
        super().__init__()
        self._runs: dict[str, RunRow] = {}
        self._starts: dict[str, StartRow] = {}
        self._active: dict[str, float] = {}
        self._groups: dict[tuple[str, str], GroupRow] = {}
        self._samples: dict[tuple[str, str, str], StoredSample] = {}
        self._batches: dict[tuple[str, str], BatchRow] = {}
        self._checkpoints: dict[tuple[str, int], CheckpointRow] = {}
        self._segment_bytes = segment_bytes
        self._bodies: dict[int, list[bytes]] = {1: []}
        """Bodies by segment; the last segment grows."""
        self._sizes = Counter({1: 0})

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    def submit(self, rows: Sequence[Row], body: bytes | memoryview | None, done: Done) -> None:
        # Encoded as for a disk, to reject what a journal would reject, and to protect the rows from later changes.
        entry = make_entry(rows, body)
        location = None if body is None else self._keep(bytes(body))
        for row in entry.rows:
            self._apply(row, location)
        # Called before `submit` returns; a journal calls it in a later turn of the loop.
        done(location, None)

    def _keep(self, body: bytes) -> Location:
        last = max(self._bodies)
        if self._sizes[last] >= self._segment_bytes:
            last += 1
            self._bodies[last] = []
        self._bodies[last].append(body)
        self._sizes[last] += len(body)
        return Location(last, len(self._bodies[last]) - 1, len(body))

    def _apply(self, row: Row, location: Location | None) -> None:
        if isinstance(row, SampleRow):
            assert location is not None
            self._apply_sample(row, location)
        elif isinstance(row, GroupRow):
            self._groups[row.run_id, row.group_id] = row
        elif isinstance(row, RunRow):
            self._runs[row.run_id] = row
            self._raise_active(row.run_id, row.active_s)
            if row.state == REMOVED:
                self._remove(row.run_id)
        elif isinstance(row, StartRow):
            self._starts[row.run_id] = row
        elif isinstance(row, BatchRow):
            self._batches[row.run_id, row.batch_id] = row
        elif isinstance(row, CheckpointRow):
            self._checkpoints[row.run_id, row.step] = row
        elif isinstance(row, TickRow):
            self._active[row.run_id] = row.active_s
        # A `ColumnsRow` is not needed: removing a segment here removes only bodies.

    def _remove(self, run_id: str) -> None:
        del self._runs[run_id], self._active[run_id]
        self._starts.pop(run_id, None)
        tables: list[dict[Any, Any]] = [self._groups, self._samples, self._batches, self._checkpoints]
        for rows in tables:
            for key in [key for key in rows if key[0] == run_id]:
                del rows[key]

    def _apply_sample(self, row: SampleRow, location: Location) -> None:
        # Removed first, so that a replaced sample moves to the end.
        key = (row.run_id, row.group_id, row.uid)
        self._samples.pop(key, None)
        self._samples[key] = StoredSample(row, location)
        self._raise_active(row.run_id, row.at_s)
        if row.outcome == "member":
            self._groups.setdefault((row.run_id, row.group_id), implied_group(row))

    def _raise_active(self, run_id: str, seconds: float) -> None:
        self._active[run_id] = max(seconds, self._active.get(run_id, seconds))

    async def read(self, locations: Sequence[Location]) -> list[bytes]:
        try:
            return [self._bodies[location.segment][location.offset] for location in locations]
        except LookupError:
            raise StorageFailed("no body is stored at this location", what="a stored body cannot be read") from None

    def drop_bodies(self) -> None:
        """Drop every body, as if each segment had been removed, because the caller no longer needs them."""
        following = max(self._bodies) + 1
        self._bodies, self._sizes = {following: []}, Counter({following: 0})

    async def recover(self) -> None:
        return None

    async def load_runs(self) -> list[RunRow]:
        rows = sorted(self._runs.values(), key=lambda row: row.created_at_s)
        return [replace(row, active_s=self._active[row.run_id]) for row in rows]

    async def load_start(self, run_id: str) -> StartRow | None:
        return self._starts.get(run_id)

    async def load_groups(self, run_id: str) -> list[GroupRow]:
        # Copies, because the caller changes its rows.
        rows = [replace(row) for row in self._groups.values() if row.run_id == run_id]
        return sorted(rows, key=lambda row: row.number)

    async def load_samples(self, run_id: str) -> list[StoredSample]:
        live = {group_id for (run, group_id), row in self._groups.items() if run == run_id and row.state in LIVE}
        return [s for s in self._of_run(run_id) if s.row.outcome in ("member", "part") and s.row.group_id in live]

    def _of_run(self, run_id: str) -> Iterator[StoredSample]:
        for sample in self._samples.values():
            if sample.row.run_id == run_id:
                yield StoredSample(replace(sample.row), sample.location)

    async def load_batches(self, run_id: str, *, after: int = 0, limit: int | None = None) -> list[BatchRow]:
        rows = [replace(row) for row in self._batches.values() if row.run_id == run_id and row.number > after]
        return sorted(rows, key=lambda row: row.number)[:limit]

    async def find_batches(self, run_id: str, batch_ids: Sequence[str]) -> list[BatchRow]:
        found = (self._batches.get((run_id, batch_id)) for batch_id in batch_ids)
        return [replace(row) for row in found if row is not None]

    async def load_checkpoints(self, run_id: str) -> list[CheckpointRow]:
        rows = [replace(row) for row in self._checkpoints.values() if row.run_id == run_id]
        return sorted(rows, key=lambda row: row.step)

    async def uids_by_group(self, run_id: str, limit: int | None = None) -> dict[str, list[str]] | None:
        found: dict[str, list[str]] = {}
        for run, group_id, uid in self._samples:
            if run == run_id and not uid.startswith(PART_PREFIX):
                found.setdefault(group_id, []).append(uid)
        is_over = limit is not None and sum(map(len, found.values())) > limit
        return None if is_over else found

    async def catch_up(self) -> None:
        return None

    async def find(
        self, run_id: str, group_ids: Sequence[str], instance_ids: Sequence[InstanceId] = (), *, has_uids: bool = True
    ) -> list[FoundGroup]:
        keys = dict.fromkeys(group_ids)
        for instance_id in instance_ids:
            known = [row for (run, _), row in self._groups.items() if run == run_id and row.instance_id == instance_id]
            newest = sorted(known, key=lambda row: row.epoch)[-NEWEST_GROUPS:]
            keys |= dict.fromkeys(row.group_id for row in newest)
        uids = await self.uids_by_group(run_id) if has_uids else None
        rows = {key: self._groups.get((run_id, key)) for key in keys}
        return [FoundGroup(key, row and replace(row), (uids or {}).get(key, [])) for key, row in rows.items()]

    async def closed_groups(self, run_id: str, after: int) -> list[GroupRow]:
        rows = [row for row in await self.load_groups(run_id) if row.closed_seq > after]
        return sorted(rows, key=lambda row: row.closed_seq)

    async def groups(
        self, run_id: str, *, state: str | None = None, after: str = "", limit: int = 100, newest: bool = False
    ) -> list[GroupRow]:
        rows = await self.load_groups(run_id)
        if newest:
            rows.reverse()
        if after:
            rows = rows[self._place(rows, run_id, after) :]
        return [row for row in rows if state in (None, row.state)][:limit]

    def _place(self, rows: list[GroupRow], run_id: str, group_id: str) -> int:
        for place, row in enumerate(rows, start=1):
            if row.group_id == group_id:
                return place
        raise GroupNotFound(run_id, group_id)

    async def samples_of(self, run_id: str, group_ids: Sequence[str]) -> dict[str, list[StoredSample]]:
        found: dict[str, list[StoredSample]] = {group_id: [] for group_id in group_ids}
        for sample in self._of_run(run_id):
            if sample.row.group_id in found:
                found[sample.row.group_id].append(sample)
        return found

    async def notes(self, run_id: str, prefix: str, since_s: float) -> list[StoredSample]:  # noqa: ARG002 - has all
        return [each for each in self._of_run(run_id) if each.row.uid.startswith(prefix)]

    def stats(self) -> StoreStats:
        return StoreStats(num_bytes=self._sizes.total(), num_segments=len(self._bodies), location="memory")

    async def has_bodies(self, run_id: str) -> bool:
        return any(not self.has_removed(s.location) for s in self._of_run(run_id) if s.location is not None)

    async def segments(self) -> list[Segment]:
        found: dict[int, dict[tuple[str, str], GroupBodies]] = {number: {} for number in sorted(self._bodies)[:-1]}
        for row, (number, _, length) in ((s.row, astuple(s.location)) for s in self._samples.values()):
            if number in found:
                key = (row.run_id, row.group_id)
                known = found[number].get(key, GroupBodies(*key, 0, 0, 0.0))
                newest_at_s = max(known.newest_at_s, row.received_at_s)
                part_bytes = known.part_bytes + (0 if row.is_sample else length)
                found[number][key] = GroupBodies(*key, known.num_bytes + length, part_bytes, newest_at_s)
        return [Segment(number, self._sizes[number], list(groups.values())) for number, groups in found.items()]

    async def num_row_bytes(self, segment: int) -> int:  # noqa: ARG002 - rows are not stored in segments here
        return 0

    def has_removed(self, location: Location) -> bool:
        return location.segment not in self._bodies

    async def clear(
        self, segment: int, moved: Collection[tuple[str, str]], bare: Collection[tuple[str, str]] = ()
    ) -> None:
        for key, sample in self._samples.items():
            row, location = sample.row, sample.location
            stays = not row.is_sample and (row.run_id, row.group_id) in bare
            if location.segment == segment and (row.run_id, row.group_id) in moved and not stays:
                self._samples[key] = StoredSample(row, self._keep(self._bodies[segment][location.offset]))

    async def remove(self, segment: int) -> None:
        del self._bodies[segment], self._sizes[segment]
        self._removals.end(segment)
