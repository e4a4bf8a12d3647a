"""The store without a disk: for tests, and for runs whose data may be lost."""

import asyncio
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self

from msgspec.structs import replace

from forebay.buffer.store.abc import Store, StoreStats
from forebay.buffer.store.fold import implied_group
from forebay.buffer.store.records import make_entry
from forebay.buffer.store.rows import GroupRow, Location, Row, RunRow, SampleRow, StoredSample
from forebay.core.errors import GroupNotFound, StorageFailed
from forebay.core.group import LIVE


class MemoryStore(Store):
    """Everything in dictionaries. Its contents stay when it is left and entered again, and go with the process."""

    def __init__(self) -> None:
        self._runs: dict[str, RunRow] = {}
        self._active: dict[str, float] = {}
        self._groups: dict[tuple[str, str], GroupRow] = {}
        self._samples: dict[tuple[str, str], StoredSample] = {}
        self._bodies: list[bytes] = []
        self._num_bytes = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def append(self, rows: Sequence[Row], body: bytes | memoryview | None = None) -> "asyncio.Future[Location | None]":
        done: asyncio.Future[Location | None] = asyncio.get_running_loop().create_future()
        entry = make_entry(rows, body)
        location = None if body is None else self._keep(bytes(body))
        for row in entry.rows:
            self._apply(row, location)
        done.set_result(location)
        return done

    def _keep(self, body: bytes) -> Location:
        self._bodies.append(body)
        self._num_bytes += len(body)
        return Location(1, len(self._bodies) - 1, len(body))

    def _apply(self, row: Row, location: Location | None) -> None:
        if isinstance(row, SampleRow):
            assert location is not None
            self._apply_sample(row, location)
        elif isinstance(row, GroupRow):
            self._groups[row.run_id, row.group_id] = row
        elif isinstance(row, RunRow):
            self._runs[row.run_id] = row
            self._raise_active(row.run_id, row.active_s)
        else:
            self._active[row.run_id] = row.active_s

    def _apply_sample(self, row: SampleRow, location: Location) -> None:
        # Taken out first, so that a replaced sample moves to the end.
        self._samples.pop((row.run_id, row.uid), None)
        self._samples[row.run_id, row.uid] = StoredSample(row, location)
        self._raise_active(row.run_id, row.at_s)
        if row.outcome == "member":
            self._groups.setdefault((row.run_id, row.group_id), implied_group(row))

    def _raise_active(self, run_id: str, seconds: float) -> None:
        self._active[run_id] = max(seconds, self._active.get(run_id, seconds))

    async def read(self, locations: Sequence[Location]) -> list[bytes]:
        try:
            return [self._bodies[location.offset] for location in locations]
        except IndexError:
            raise StorageFailed("there is none at this place", what="a stored body cannot be read") from None

    async def recover(self) -> None:
        return None

    async def load_runs(self) -> list[RunRow]:
        return [replace(row, active_s=self._active[row.run_id]) for row in self._runs.values()]

    async def load_groups(self, run_id: str) -> list[GroupRow]:
        return [replace(row) for row in self._groups.values() if row.run_id == run_id]

    async def load_samples(self, run_id: str) -> list[StoredSample]:
        return [sample for sample in self._of_run(run_id) if self._is_live_member(sample.row)]

    def _is_live_member(self, row: SampleRow) -> bool:
        return row.outcome == "member" and self._groups[row.run_id, row.group_id].state in LIVE

    def _of_run(self, run_id: str) -> Iterator[StoredSample]:
        for sample in self._samples.values():
            if sample.row.run_id == run_id:
                yield StoredSample(replace(sample.row), sample.location)

    async def load_uids(self, run_id: str) -> Iterator[str]:
        return iter([uid for run, uid in self._samples if run == run_id])

    async def groups(
        self, run_id: str, *, state: str | None = None, after: str = "", limit: int = 100
    ) -> list[GroupRow]:
        rows = await self.load_groups(run_id)
        if after:
            rows = rows[self._place(rows, run_id, after) :]
        return [row for row in rows if state in (None, row.state)][:limit]

    def _place(self, rows: list[GroupRow], run_id: str, group_id: str) -> int:
        for place, row in enumerate(rows, start=1):
            if row.group_id == group_id:
                return place
        raise GroupNotFound(run_id, group_id)

    async def samples(self, run_id: str, group_id: str) -> list[StoredSample]:
        return [sample for sample in self._of_run(run_id) if sample.row.group_id == group_id]

    def stats(self) -> StoreStats:
        return StoreStats(num_bytes=self._num_bytes, num_segments=1, location="memory")
