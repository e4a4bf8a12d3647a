"""The durable store: a log that holds the truth, and an index that answers questions."""

import asyncio
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from forebay.buffer.store import queries
from forebay.buffer.store.abc import Store, StoreStats
from forebay.buffer.store.bodies import BodyReader
from forebay.buffer.store.data_dir import DataDir
from forebay.buffer.store.feeder import Feeder
from forebay.buffer.store.files import DiskFiles, Files
from forebay.buffer.store.index import Index, is_corrupt
from forebay.buffer.store.records import make_entry
from forebay.buffer.store.rows import GroupRow, Location, Row, RunRow, StoredSample
from forebay.buffer.store.segments import SEGMENT_BYTES, SegmentLog
from forebay.buffer.store.writer import Append, Job, Writer
from forebay.core.errors import StorageFailed

ResultT = TypeVar("ResultT")


class JournalStore(Store):
    """Rows and bodies in the data directory ``path`` (docs/storage.md)."""

    def __init__(self, path: Path, *, segment_bytes: int = SEGMENT_BYTES, files: Files | None = None) -> None:
        files = files or DiskFiles()
        self._dir = DataDir(path)
        self._log = SegmentLog(self._dir.segments, self._dir.quarantine, files, segment_bytes)
        self._bodies = BodyReader(self._dir.segments, files)
        self._unusable = f"the data directory {path} cannot be used"
        self._writer: Writer | None = None
        self._generation = 0

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        writer = Writer(self._log, Feeder(self._log, Index(self._dir.index)), loop)
        with _told_as_storage_failed(self._unusable):
            await asyncio.to_thread(self._dir.open)
        writer.start()
        self._writer, self._generation = writer, 0
        try:
            with _told_as_storage_failed(self._unusable):
                await self._do(writer.open)
        except BaseException:  # a store that was not opened holds neither a thread nor the lock
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    async def _close(self) -> None:
        writer = self._opened()
        closed = self._do(writer.close)
        self._writer = None
        try:
            await closed
        finally:
            await asyncio.to_thread(writer.join)
            self._dir.close()

    def append(self, rows: Sequence[Row], body: bytes | memoryview | None = None) -> "asyncio.Future[Location | None]":
        writer = self._opened()
        done: asyncio.Future[Location | None] = writer.loop.create_future()
        writer.put(Append(make_entry(rows, body), self._generation, done))
        return done

    async def read(self, locations: Sequence[Location]) -> list[bytes]:
        self._opened()
        bodies = self._bodies.read_cached(locations)
        return await asyncio.to_thread(self._bodies.read, locations) if bodies is None else bodies

    async def recover(self) -> None:
        with _told_as_storage_failed():
            self._generation = await self._do(self._opened().recover)

    async def load_runs(self) -> list[RunRow]:
        return await self._ask(queries.runs)

    async def load_groups(self, run_id: str) -> list[GroupRow]:
        return await self._ask(partial(queries.groups, run_id=run_id))

    async def load_samples(self, run_id: str) -> list[StoredSample]:
        return await self._ask(partial(queries.live_samples, run_id=run_id))

    async def load_uids(self, run_id: str) -> Iterator[str]:
        return iter(await self._ask(partial(queries.uids, run_id=run_id)))

    async def groups(
        self, run_id: str, *, state: str | None = None, after: str = "", limit: int = 100
    ) -> list[GroupRow]:
        return await self._ask(partial(queries.group_page, run_id=run_id, state=state, after=after, limit=limit))

    async def samples(self, run_id: str, group_id: str) -> list[StoredSample]:
        return await self._ask(partial(queries.group_samples, run_id=run_id, group_id=group_id))

    def stats(self) -> StoreStats:
        return StoreStats(
            num_bytes=self._log.num_bytes,
            num_segments=self._log.num_segments,
            num_quarantined=self._log.num_quarantined,
            num_torn_bytes=self._log.num_torn_bytes,
            location=str(self._dir.path),
        )

    async def _ask(self, query: queries.Query[ResultT]) -> ResultT:
        """The answer of the index, brought up to date first, and built anew if it turns out to be damaged."""
        await self._do(self._opened().flush)
        try:
            return await asyncio.to_thread(queries.ask, self._dir.index, query)
        except sqlite3.Error as error:
            if not is_corrupt(error):
                raise StorageFailed(str(error), what=self._unusable) from error
        with _told_as_storage_failed(self._unusable):
            await self._do(self._opened().rebuild_index)
            return await asyncio.to_thread(queries.ask, self._dir.index, query)

    def _do(self, call: Callable[[], ResultT]) -> "asyncio.Future[ResultT]":
        """Have ``call`` made in the writer's thread, once everything appended so far is committed."""
        writer = self._opened()
        done: asyncio.Future[ResultT] = writer.loop.create_future()
        writer.put(Job(call, done))
        return done

    def _opened(self) -> Writer:
        if self._writer is None:
            raise RuntimeError("the store is not open: use it inside `async with store:`")
        return self._writer


@contextmanager
def _told_as_storage_failed(what: str = "the journal cannot be written") -> Iterator[None]:
    try:
        yield
    except StorageFailed:
        raise
    except (OSError, sqlite3.Error) as error:
        raise StorageFailed(str(error), what=what) from error
