"""The thread that owns the log and the index, and its queue from the event loop's thread."""

import asyncio
import errno
import logging
import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import msgspec

from forebay.buffer.store.abc import Done
from forebay.buffer.store.index import Feeder, batches
from forebay.buffer.store.log_segments import SegmentLog
from forebay.buffer.store.reserve import SPARE_BYTES, Reserve, is_no_room
from forebay.core.errors import StorageFailed
from forebay.core.records.log_records import LogEntry, Position, make_entry
from forebay.core.records.rows import Location, Row
from forebay.core.waiting import finish

BATCH_BYTES = 16 * 1024 * 1024
"""A commit accepts no further entry once it is this large."""
IDLE_S = 0.01
"""Idle seconds before the index is fed."""
LOOK_S = 1.0
"""Seconds between checks whether a full disk has room again."""
PROBE_BYTES = 64 * 1024
ROWS_PER_ENTRY = 64
ENTRIES_PER_COMMIT = 64

_LATE = "an earlier write failed, and the journal has recovered since"

logger = logging.getLogger(__name__)


class Append(msgspec.Struct, frozen=True, gc=False):
    """An entry to commit. ``generation`` counts the recoveries that its caller knows of."""

    entry: LogEntry
    generation: int
    done: Done


class Job(NamedTuple):
    """A call to make once everything queued before it is committed."""

    call: Callable[[], Any]
    done: "asyncio.Future[Any]"


class LogWriter:
    """Commits appends in groups: one write, one wait for the disk, one wake-up of the loop.

    After a failure it refuses everything until ``recover``, and afterwards still refuses appends of callers that
    do not know of the recovery.

    On a full disk, entries without a body are still written, in room freed from the ``reserve``.
    """

    def __init__(self, log: SegmentLog, feeder: Feeder, reserve: Reserve, loop: asyncio.AbstractEventLoop) -> None:
        self._log = log
        self._feeder = feeder
        self._reserve = reserve
        self.loop = loop
        self._queue: SimpleQueue[list[Append | Job]] = SimpleQueue()
        self._taken: deque[Append | Job] = deque()
        self._gathered: list[Append | Job] = []
        self._thread = threading.Thread(target=self._run, name="forebay-journal", daemon=True)
        self._failure: Exception | None = None
        self._failed_bytes = 0
        self._index_failed = False
        self._generation = 0
        self._is_stopping = False
        self._next_look_s = 0.0
        self.is_on_reserve = False
        """Whether the disk is full, so that rows without a body use the reserved room. Readable from any thread."""

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(self, item: Append | Job) -> None:
        """Queue ``item``, from the loop's thread. Items queued in one turn of the loop are handed over together.

        Each hand-over wakes the thread, which then competes for the interpreter with the loop.
        """
        self._gathered.append(item)
        if len(self._gathered) == 1:
            self.loop.call_soon(self._hand_over)

    def _hand_over(self) -> None:
        gathered, self._gathered = self._gathered, []
        self._queue.put(gathered)

    @property
    def has_failed(self) -> bool:
        """Whether everything is refused until ``recover``. Callable from any thread."""
        return self._failure is not None

    def join(self) -> None:
        """Wait for the thread, which ends after ``close`` has run in it."""
        self._thread.join()

    # The following methods run in the thread: as a job, or from the loop below.

    def open(self) -> None:
        """Repair the log, and bring the index up to date."""
        self._reserve.open()
        self._log.open()
        self._open_index()

    def _open_index(self) -> None:
        while True:
            try:
                self._feeder.open()
            except sqlite3.Error as error:
                self._feeder.close()
                if not self._spend(error):
                    raise
            else:
                return

    def _spend(self, error: BaseException) -> bool:
        """Release part of the reserve if ``error`` means that the disk is full; return whether to retry."""
        if not is_no_room(error) or not self._reserve.give():
            return False
        if not self.is_on_reserve:
            logger.error("the disk is full (%s): stored samples are read and acknowledged using the reserve", error)
            self.is_on_reserve = True
            self._feeder.save_room()
        return True

    def _look_for_room(self) -> None:
        """Refill the reserve if the disk has room."""
        if time.monotonic() < self._next_look_s:
            return
        self._next_look_s = time.monotonic() + LOOK_S
        if self._failure is None and self._reserve.fill(SPARE_BYTES):
            self._feeder.take_room()
            self.is_on_reserve = False
            logger.warning("the disk has room again: the reserve is filled, and new samples are accepted")

    def flush(self) -> Position:
        """Bring the index up to date; return the log position it has reached. Raises ``StorageFailed``."""
        # Queries would otherwise answer with the state before the failure.
        if self._index_failed:
            raise self._refusal()
        self._feed(self._feeder.flush)
        if self._index_failed:
            raise self._refusal()
        return self._feeder.position

    def catch_up(self, end: Position | None = None) -> Position | None:
        """Bring one slice into the index; return ``end``, by default the log's, until the index has reached it.

        Unlike ``flush``, lets appends be committed between two calls. Raises ``StorageFailed``.
        """
        end = end or self._log.end
        if not self._index_failed:  # as in `flush`
            self._feed(self._feeder.feed)
        if self._index_failed:
            raise self._refusal()
        return end if self._feeder.has_backlog and self._feeder.position < end else None

    @property
    def num_index_builds(self) -> int:
        """How often the index was started from empty. Callable from any thread."""
        return self._feeder.num_builds

    def rebuild_index(self, num_builds: int, reason: str) -> None:
        """Rebuild the index from the log, unless it was rebuilt since ``num_builds`` was read."""
        if self.num_index_builds == num_builds:
            self._feeder.rebuild(reason)

    def rewrite(self, find_rows: Callable[[], Sequence[Row]], generation: int) -> None:
        """Rewrite the rows that ``find_rows`` takes from the index. No other write happens in between.

        Raises ``StorageFailed``, also if the caller does not know of the last recovery.
        """
        self.check(generation)
        self.flush()
        entries = [make_entry(part, None) for part in batches(find_rows(), ROWS_PER_ENTRY)]
        try:
            for part in batches(entries, ENTRIES_PER_COMMIT):
                self._feeder.add(part, self._write(part))
        except OSError as error:
            # The size of the failed write is unknown here; `recover` tests the disk with at least this much.
            self._failed_bytes = PROBE_BYTES
            self._fail(error)
            raise self._refusal() from error
        self.flush()

    def remove(self, segment: int, generation: int) -> None:
        """Remove a segment that is no longer needed. Raises ``StorageFailed`` and ``OSError``."""
        self.check(generation)
        self._log.remove(segment)

    def check(self, generation: int) -> None:
        """Raise ``StorageFailed`` after a failure, and after its recovery if the caller does not know of it."""
        if self._failure is not None or generation != self._generation:
            raise StorageFailed(str(self._failure or _LATE))

    def recover(self) -> int:
        """Truncate the log after its last confirmed record, test the disk, repair the index; the new generation."""
        if self._failure is not None:
            self._log.cut()
            self._probe()
            # Its missing entries are read from the log, which holds everything that was confirmed.
            if self._index_failed:
                self._feeder.close()
                self._open_index()
            self._failure, self._index_failed, self._failed_bytes = None, False, 0
            logger.warning("the journal accepts writes again")
        return self._generation

    def _probe(self) -> None:
        # As much as failed: a full disk may accept a few bytes and refuse the next commit.
        num_bytes = PROBE_BYTES if self.is_on_reserve else min(max(self._failed_bytes, PROBE_BYTES), BATCH_BYTES)
        try:
            self._log.probe(num_bytes)
        except OSError as error:
            if not self._spend(error):
                raise
            self._probe()

    def close(self) -> None:
        """End the thread and close everything."""
        self._is_stopping = True
        if self._failure is not None:
            self._cut_quietly()
        with suppress(sqlite3.Error):  # the next opening reads from the log what the index lacks
            self._feeder.flush()
        self._feeder.close()
        self._log.close()

    def _run(self) -> None:
        while not self._is_stopping:
            if self.is_on_reserve:
                self._look_for_room()
            appends, job = self._take()
            if appends:
                self._commit(appends)
            if job is not None:
                self._do(job)
            # Commits wait for the index here, which slows writers down before its backlog fills the memory.
            while self._feeder.is_pressing and not self._is_stopping:
                self._feed(self._feeder.feed)

    def _take(self) -> tuple[list[Append], Job | None]:
        """Take queued items up to the first job or ``BATCH_BYTES``; waits until there is one."""
        appends: list[Append] = []
        num_bytes = 0
        while num_bytes < BATCH_BYTES and self._has_more(wait=not appends):
            item = self._taken.popleft()
            # A job runs after all earlier appends are committed, so it ends the batch.
            if isinstance(item, Job):
                return appends, item
            appends.append(item)
            num_bytes += item.entry.num_bytes
        return appends, None

    def _has_more(self, *, wait: bool) -> bool:
        """Whether something is queued; with ``wait``, waits until it is."""
        while not self._taken:
            try:
                self._taken += self._wait() if wait else self._queue.get_nowait()
            except Empty:
                return False
        return True

    def _wait(self) -> list[Append | Job]:
        # The index is fed when there is nothing else to do.
        while self._feeder.has_backlog:
            with suppress(Empty):
                return self._queue.get(timeout=IDLE_S)
            self._feed(self._feeder.feed)
        while self.is_on_reserve:
            with suppress(Empty):
                return self._queue.get(timeout=LOOK_S)
            self._look_for_room()
        return self._queue.get()

    def _commit(self, appends: Sequence[Append]) -> None:
        # Refused between a failure and its recovery, and from a caller that does not know of it: its memory is ahead of
        # the disk.
        taken = [append for append in appends if self._failure is None and append.generation == self._generation]
        refused = [append for append in appends if self._failure is not None or append.generation != self._generation]
        # One write and one fdatasync for everything queued during the last one.
        entries = [append.entry for append in taken]
        try:
            locations = self._write(entries) if entries else []
        except Exception as error:  # noqa: BLE001 - whatever failed, no caller may wait for ever
            self._failed_bytes = sum(entry.num_bytes for entry in entries)
            self._fail(error)
            taken, refused, locations = [], list(appends), []
        else:
            # After the disk has it: an index ahead of the log would be rebuilt.
            self._feeder.add(entries, locations)
        if taken:
            self._call_in_loop(_confirm, taken, locations)
        if refused:
            self._call_in_loop(_refuse_all, refused, str(self._failure or _LATE))

    def _write(self, entries: Sequence[LogEntry]) -> list[Location | None]:
        # The reserve is for changes that let bodies be removed, not for samples queued before the disk was known full.
        if self.is_on_reserve and _has_body(entries):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        while True:
            try:
                return self._log.write(entries)
            except OSError as error:
                if _has_body(entries) or not self._spend(error):
                    raise
                self._log.cut()

    def _feed(self, feed: Callable[[], None]) -> None:
        try:
            feed()
        except Exception as error:  # noqa: BLE001 - the thread must continue, to answer waiting callers
            if self._spend(error):
                self._feed(feed)
                return
            self._index_failed = True
            self._fail(error)
            self._feeder.forget()

    def _fail(self, error: Exception) -> None:
        logger.error("the journal cannot be written: %s", error, exc_info=not isinstance(error, OSError))
        self._failure = error
        # Counted at the failure: items already queued, or submitted before the caller learns of it, belong to an older
        # generation.
        self._generation += 1
        self._cut_quietly()

    def _cut_quietly(self) -> None:
        with suppress(OSError):  # `recover` repeats it and reports the error
            self._log.cut()

    def _refusal(self) -> StorageFailed:
        return StorageFailed(str(self._failure))

    def _do(self, job: Job) -> None:
        try:
            result = job.call()
        except Exception as error:  # noqa: BLE001 - it is passed to the waiting caller
            self._call_in_loop(finish, job.done, None, error)
        else:
            self._call_in_loop(finish, job.done, result, None)

    def _call_in_loop(self, call: Callable[..., None], *arguments: object) -> None:
        with suppress(RuntimeError):  # the loop was closed without leaving the store, so no caller is waiting
            self.loop.call_soon_threadsafe(call, *arguments)


def _has_body(entries: Sequence[LogEntry]) -> bool:
    return any(entry.body is not None for entry in entries)


def _confirm(appends: Sequence[Append], locations: Sequence[Location | None]) -> None:
    for append, location in zip(appends, locations, strict=True):
        try:
            append.done(location, None)
        except Exception:  # one caller's failure must not leave the others waiting
            logger.exception("the caller of an append failed after the append was stored")


def _refuse_all(appends: Sequence[Append], reason: str) -> None:
    for append in appends:
        append.done(None, StorageFailed(reason))
