"""The durable store: a log as the source of truth, and an index that answers queries."""

import asyncio
import sqlite3
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from socket import socket
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from forebay.buffer.store import index_queries, removal
from forebay.buffer.store.abc import Done, GroupBodies, Outbound, Piece, Removals, Segment, Slice, Store, StoreStats
from forebay.buffer.store.bodies import BodyReader
from forebay.buffer.store.data_dir import DataDir
from forebay.buffer.store.index import START, Feeder, Index, batches
from forebay.buffer.store.index_damage import is_damage
from forebay.buffer.store.log_segments import SEGMENT_BYTES, SegmentLog
from forebay.buffer.store.log_writer import Append, Job, LogWriter
from forebay.buffer.store.removal import Clearing
from forebay.buffer.store.reserve import Reserve
from forebay.buffer.store.send_bodies import BodyTransfer
from forebay.core.errors import StorageFailed
from forebay.core.ids import InstanceId
from forebay.core.records.disk_files import DiskFiles, Files
from forebay.core.records.log_records import make_entry
from forebay.core.records.rows import (
    REMOVED,
    FoundGroup,
    Location,
    Row,
    RunRow,
)
from forebay.core.tasks import TaskSet
from forebay.core.waiting import finish

ArgumentT = TypeVar("ArgumentT")
ResultT = TypeVar("ResultT")
P = ParamSpec("P")

REBUILDS = 3
"""Number of times that one query may find the index damaged and have it rebuilt."""
GROUPS_AT_A_TIME = 256
"""Number of groups whose samples are in memory at a time while they are rewritten."""


def _asking(
    query: Callable[Concatenate[sqlite3.Connection, P], ResultT],
) -> Callable[Concatenate["JournalStore", P], Coroutine[Any, Any, ResultT]]:
    """The method that puts ``query`` to the index."""

    async def ask(self: "JournalStore", /, *args: P.args, **kwargs: P.kwargs) -> ResultT:
        return await self._ask(lambda connection: query(connection, *args, **kwargs))

    return ask


class JournalStore(Store):
    """Rows and bodies in the data directory ``path`` (docs/storage.md)."""

    def __init__(
        self, path: Path, *, segment_bytes: int = SEGMENT_BYTES, reserve_bytes: int = 0, files: Files | None = None
    ) -> None:
        super().__init__()
        files = files or DiskFiles()
        self._dir = DataDir(path)
        self._log = SegmentLog(self._dir.segments, self._dir.quarantine, files, segment_bytes)
        self._reserve = Reserve(self._dir.reserve, reserve_bytes, files)
        self._bodies = BodyReader(self._dir.segments, files)
        self._unusable = f"the data directory {path} cannot be used"
        self._writer: LogWriter | None = None
        self._covered = START
        """Log position up to which the index is known to be complete."""
        self._bodies_in: dict[int, list[GroupBodies]] = {}
        """Bodies by closed segment; they change only by a removal."""
        self._reading: set[asyncio.Future[Any]] = set()
        self._questions: list[tuple[index_queries.Query[Any], asyncio.Future[Any]]] = []
        self._asking = TaskSet()

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        # A new one for each opening, because a thread cannot be started twice.
        writer = LogWriter(self._log, Feeder(self._log, Index(self._dir.index)), self._reserve, loop)
        with _as_storage_failed(self._unusable):
            # Before the writer's thread starts: without the lock, another process might be writing.
            await asyncio.to_thread(self._dir.open)
        writer.start()
        self._writer, self._generation, self._covered = writer, 0, START
        self._bodies_in.clear()
        self._removals = Removals()
        try:
            with _as_storage_failed(self._unusable):
                await self._do(writer.open)
        except BaseException:  # a store that failed to open must keep neither a thread nor the lock
            await self._close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    async def _close(self) -> None:
        writer = self._opened()
        # Queued after all appends, which are thus committed first.
        closed = self._do(writer.close)
        self._writer = None
        try:
            await closed
        finally:
            # In a thread, because a last commit may wait for the disk.
            await asyncio.to_thread(writer.join)
            await self._asking.drain()
            self._dir.close()

    def submit(self, rows: Sequence[Row], body: bytes | memoryview | None, done: Done) -> None:
        self._opened().put(Append(make_entry(rows, body), self._generation, done))

    async def read(self, locations: Sequence[Location]) -> list[bytes]:
        return await self.read_slices([Slice(location, 0, location.length) for location in locations])

    async def read_slices(self, slices: Sequence[Slice]) -> list[bytes]:
        self._opened()
        # Reading the page cache takes microseconds; a thread costs more, and must be scheduled.
        found = self._bodies.read_slices_cached(slices)
        return await self._in_thread(self._bodies.read_slices, slices) if found is None else found

    async def prove(self, locations: Sequence[Location]) -> None:
        self._opened()
        if not self._bodies.prove_cached(locations):
            await self._in_thread(self._bodies.prove, locations)

    async def gather(self, pieces: Sequence[Piece]) -> bytes | bytearray:
        self._opened()
        data = self._bodies.gather_cached(pieces)
        return await self._in_thread(self._bodies.gather, pieces) if data is None else data

    async def send(self, pieces: Sequence[Outbound], connection: socket) -> bool:
        self._opened()
        transfer = BodyTransfer(self._bodies, pieces)
        try:
            while not await self._send_on(transfer, connection):
                await _writable(connection)
        finally:
            transfer.close()
        return True

    async def _send_on(self, transfer: BodyTransfer, connection: socket) -> bool:
        """Run one turn in a thread; it ends before the socket may be closed."""
        # The thread cannot be cancelled, so the caller must not close the socket while it runs.
        turn = asyncio.ensure_future(self._in_thread(transfer.go, connection))
        try:
            return await asyncio.shield(turn)
        except asyncio.CancelledError:
            transfer.stop()
            await asyncio.wait({turn})
            raise
        finally:
            del turn  # its error refers to this frame, and both would wait for the cyclic garbage collector

    async def recover(self) -> None:
        with _as_storage_failed():
            # Earlier appends have the old generation, and stay refused even if they are committed only now.
            self._generation = await self._do(self._opened().recover)

    @property
    def is_on_reserve(self) -> bool:
        return self._writer is not None and self._writer.is_on_reserve

    async def load_runs(self) -> list[RunRow]:
        return [row for row in await self._ask(index_queries.runs) if row.state != REMOVED]

    load_start = _asking(index_queries.start)
    load_groups = _asking(index_queries.groups)
    load_samples = _asking(index_queries.live_samples)
    load_batches = _asking(index_queries.batches)
    find_batches = _asking(index_queries.find_batches)
    load_checkpoints = _asking(index_queries.checkpoints)
    uids_by_group = _asking(index_queries.uids_by_group)
    closed_groups = _asking(index_queries.closed_groups)
    groups = _asking(index_queries.group_page)
    samples_of = _asking(index_queries.samples_of)
    notes = _asking(index_queries.notes)
    num_row_bytes = _asking(removal.num_row_bytes)

    async def catch_up(self) -> None:
        self._covered = await self._do(self._opened().flush)

    async def find(
        self, run_id: str, group_ids: Sequence[str], instance_ids: Sequence[InstanceId] = (), *, has_uids: bool = True
    ) -> list[FoundGroup]:
        query = partial(
            index_queries.find,
            run_id=run_id,
            group_ids=group_ids,
            instance_ids=instance_ids,
            has_uids=has_uids,
            up_to=self._covered,
        )
        found = None
        num_builds = self._opened().num_index_builds
        with suppress(sqlite3.Error):  # it is reported, or the index repaired, below
            # Does not wait for the writer, which is busy while groups open.
            found = await asyncio.to_thread(index_queries.ask, self._dir.index, query)
        if found is None or num_builds != self._opened().num_index_builds:
            found = await self._ask(query)
        if found is None:
            raise StorageFailed(
                "it is less complete than before", what="the index cannot be queried", hint="restart the server"
            )
        return found

    def stats(self) -> StoreStats:
        return StoreStats(
            num_bytes=self._log.num_bytes,
            num_segments=self._log.num_segments,
            num_quarantined=self._log.num_quarantined,
            num_torn_bytes=self._log.num_torn_bytes,
            location=str(self._dir.path),
            takes_writes=self._writer is None or not self._writer.has_failed,
        )

    async def remove_run(self, run_id: str) -> None:
        await super().remove_run(run_id)
        self._bodies_in.clear()

    async def has_bodies(self, run_id: str) -> bool:
        return any(map(self._log.has, await self._ask(partial(removal.segments_of, run_id=run_id))))

    async def segments(self) -> list[Segment]:
        return [Segment(number, size, await self._bodies_of(number)) for number, size in self._log.closed.items()]

    async def _bodies_of(self, segment: int) -> list[GroupBodies]:
        known = self._bodies_in.get(segment)
        if known is None:
            # A query over all samples of a segment, so each result is cached.
            known = await self._ask(partial(removal.bodies, segment=segment))
            self._bodies_in[segment] = known
        return known

    def has_removed(self, location: Location) -> bool:
        return not self._log.has(location.segment)

    async def clear(
        self, segment: int, moved: Collection[tuple[str, str]], bare: Collection[tuple[str, str]] = ()
    ) -> None:
        if moved:
            self.check_room()
        clearing = Clearing(self._log, self._bodies, segment, moved, bare)
        find = partial(self._find, partial(removal.current_rows, segment=segment))
        try:
            with _as_storage_failed(f"segment {segment} cannot be cleared"):
                await self._ask_alone(clearing.verify)
                # Bodies are read and appended a few groups at a time, because a segment may be larger than the free
                # memory.
                for keys in batches(await self._ask_alone(clearing.keys), GROUPS_AT_A_TIME):
                    additions = await self._ask_alone(partial(clearing.additions, keys=keys))
                    await asyncio.gather(*(self.append(rows, body) for rows, body in additions))
                # Last, and in the writer's thread, so that a row found here is still the newest when it is
                # rewritten.
                await self._do(partial(self._opened().rewrite, find, self._removals.generation(segment)))
        finally:
            self._bodies_in.pop(segment, None)

    def _find(self, query: index_queries.Query[ResultT]) -> ResultT:
        """Query the index like ``_ask``, but in the writer's thread. Raises ``sqlite3.Error``."""
        try:
            return index_queries.ask(self._dir.index, query)
        except sqlite3.DatabaseError as error:
            if not is_damage(error, self._dir.index):
                raise
            self._opened().rebuild_index(self._opened().num_index_builds, str(error))
            return index_queries.ask(self._dir.index, query)

    async def remove(self, segment: int) -> None:
        what = f"segment {segment} cannot be removed"
        # Checked again here: removing a segment too early would lose acknowledged data.
        if await self._ask(partial(removal.is_needed, segment=segment)):
            raise StorageFailed("it was not cleared", what=what, hint="try again")
        # Threads that read the old location have the file open, or are about to open it.
        if self._reading:
            await asyncio.wait(self._reading)
        with _as_storage_failed(what):
            await self._do(partial(self._opened().remove, segment, self._removals.generation(segment)))
        self._bodies_in.pop(segment, None)
        self._removals.end(segment)

    async def _ask(self, query: index_queries.Query[ResultT]) -> ResultT:
        """Query the index. Queries of the same turn of the loop share a thread and a connection."""
        answer: asyncio.Future[ResultT] = asyncio.get_running_loop().create_future()
        self._questions.append((query, answer))
        if len(self._questions) == 1:
            self._asking.start(self._answer_questions())
        return await answer

    async def _answer_questions(self) -> None:
        asked, self._questions = self._questions, []
        answers: list[Any]
        try:
            answers = await self._ask_alone(partial(index_queries.answers, queries=[query for query, _ in asked]))
        except Exception as error:  # noqa: BLE001 - every waiting `_ask` raises it
            answers = [error] * len(asked)
        for (_, future), answer in zip(asked, answers, strict=True):
            finish(future, answer, answer if isinstance(answer, Exception) else None)

    async def _ask_alone(self, query: index_queries.Query[ResultT]) -> ResultT:
        """Query the index after bringing it up to date; rebuilds it if it proves damaged."""
        with _as_storage_failed(self._unusable):
            for _ in range(REBUILDS):
                # The index follows the log with a delay, but the answer must include all earlier appends.
                end = None
                while end := await self._do(partial(self._opened().catch_up, end)):
                    pass
                num_builds = self._opened().num_index_builds
                try:
                    # Over its own connection: WAL lets it read while the writer commits.
                    answer = await asyncio.to_thread(index_queries.ask, self._dir.index, query)
                except sqlite3.DatabaseError as error:
                    if not is_damage(error, self._dir.index):
                        raise
                    await self._do(partial(self._opened().rebuild_index, num_builds, str(error)))
                else:
                    # Otherwise the answer may mix the old file with the new one's WAL.
                    if num_builds == self._opened().num_index_builds:
                        return answer
            return await asyncio.to_thread(index_queries.ask, self._dir.index, query)

    async def _in_thread(self, call: Callable[[ArgumentT], ResultT], argument: ArgumentT) -> ResultT:
        """Read bodies in a thread; their segments stay until that ends."""
        reading = asyncio.get_running_loop().run_in_executor(None, call, argument)
        self._reading.add(reading)
        reading.add_done_callback(self._reading.discard)
        try:
            return await reading
        finally:
            del reading  # for the reason given in `_send_on`

    def _do(self, call: Callable[[], ResultT]) -> "asyncio.Future[ResultT]":
        """Run ``call`` in the writer's thread, after all earlier appends are committed."""
        writer = self._opened()
        done: asyncio.Future[ResultT] = writer.loop.create_future()
        writer.put(Job(call, done))
        return done

    def _opened(self) -> LogWriter:
        if self._writer is None:
            raise RuntimeError("the store is not open: use it inside `async with store:`")
        return self._writer


async def _writable(connection: socket) -> None:
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_writer(connection, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_writer(connection)


@contextmanager
def _as_storage_failed(what: str = "the journal cannot be written") -> Iterator[None]:
    try:
        yield
    except StorageFailed:
        raise
    except (OSError, sqlite3.Error) as error:
        raise StorageFailed(str(error), what=what) from error
