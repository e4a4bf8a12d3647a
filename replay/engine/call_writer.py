"""Adds calls to a file, in a thread of its own: what is in it after a fifth of a second stays, whatever happens."""

import fcntl
import logging
import os
import queue
import sqlite3
import threading
import time
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path

from forebay.core.errors import InvalidInput
from forebay.replay.engine.call_frames import COLUMNS, CallReply, Place, compressor, encode_call
from forebay.replay.engine.call_request import CallRequest
from forebay.replay.errors import RecordingDamaged
from forebay.replay.recording_schema import create, open_recording

logger = logging.getLogger(__name__)

COMMIT_S = 0.2
MAX_WAITING_BYTES = 256 << 20
"""Of replies that wait to be written; what comes beyond is not recorded."""
INSERT = f"INSERT INTO calls ({COLUMNS}) VALUES ({', '.join('?' * len(COLUMNS.split(',')))})"  # noqa: S608 - our own text

Entry = tuple[Place, CallRequest, CallReply]


class CallWriter:
    """The calls of ``path``, which is made if it is not there, and added to if it is.

    Raises ``InvalidInput`` for a file that cannot be written, or is being written, ``RecordingDamaged`` for one that is
    no recording, ``MissingExtra`` without zstandard. What the disk refuses later is told once in the log, and counted
    in ``num_lost``: calls go on. ``num_written`` are in the file.
    """

    def __init__(self, path: Path) -> None:
        self.num_written = self.num_lost = 0
        self._path = path
        self._compress = compressor()
        self._lock = _claimed(path)
        try:
            self._connection = _opened(path)
            self._next_seq, self._next_nth, self._facts = _continued(self._connection)
        except BaseException:
            os.close(self._lock)
            raise
        self._queue: queue.SimpleQueue[Entry | None] = queue.SimpleQueue()
        self._unwritten: dict[int, Entry] = {}
        # One is added to by those who call, the other by the thread: neither needs a lock.
        self._num_put_bytes = self._num_done_bytes = 0
        self._losing = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="call-writer", daemon=True)
        self._thread.start()

    def reserve(self, request: CallRequest) -> Place:
        """The place of a call that begins now."""
        key, seq = (request.lane, request.digest), self._next_seq
        nth = self._next_nth[key]
        self._next_seq += 1
        self._next_nth[key] += 1
        return Place(seq, nth, time.time())

    def is_known_fact(self, request: CallRequest, status: int) -> bool:
        """Whether a request that changes nothing has been recorded with this status; notes it."""
        is_known = self._facts.get(request.digest) == status
        self._facts[request.digest] = status
        return is_known

    def put(self, place: Place, request: CallRequest, reply: CallReply) -> None:
        """Have a call written. Never waits."""
        size = _size(request, reply)
        if self._num_put_bytes - self._num_done_bytes + size > MAX_WAITING_BYTES:
            self._lose(1, f"{MAX_WAITING_BYTES >> 20} MiB wait to be written")
            return
        self._num_put_bytes += size
        entry = place, request, reply
        self._unwritten[place.seq] = entry
        self._queue.put(entry)

    def unwritten(self, seq: int) -> tuple[CallRequest, CallReply] | None:
        """A call that is not in the file yet."""
        entry = self._unwritten.get(seq)
        return None if entry is None else entry[1:]

    def close(self) -> None:
        """Return when all is in the file, which is then one file again, in no need of another beside it."""
        self._queue.put(None)
        self._thread.join()
        with suppress(sqlite3.Error):  # somebody reads it: it stays as it is, which is as good
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            self._connection.execute("PRAGMA journal_mode = DELETE")
        self._connection.close()
        # Only now: to close a file takes SQLite's own locks off it.
        os.close(self._lock)
        if self.num_lost:
            logger.warning("%s lacks %d calls", self._path, self.num_lost)

    # --- the thread

    def _run(self) -> None:
        is_over = False
        while not is_over:
            entries = [self._queue.get()]
            due_s = time.monotonic() + COMMIT_S
            with suppress(queue.Empty):
                while entries[-1] is not None:
                    entries.append(self._queue.get(timeout=max(0.0, due_s - time.monotonic())))
            is_over = entries[-1] is None
            self._write([entry for entry in entries if entry is not None])

    def _write(self, entries: list[Entry]) -> None:
        if not entries:
            return
        try:
            rows = [encode_call(*entry, self._compress) for entry in entries]
            self._connection.execute("BEGIN")
            self._connection.executemany(INSERT, rows)
            self._connection.execute("COMMIT")
            self.num_written += len(rows)
        except (sqlite3.Error, MemoryError) as error:
            with suppress(sqlite3.Error):  # SQLite may have rolled it back already
                self._connection.execute("ROLLBACK")
            self._lose(len(entries), str(error))
        finally:
            self._num_done_bytes += sum(_size(request, reply) for _, request, reply in entries)
            for place, _, _ in entries:
                del self._unwritten[place.seq]

    def _lose(self, num_calls: int, why: str) -> None:
        with self._losing:
            if not self.num_lost:
                logger.warning("%s: calls go on, but are not recorded any more: %s", self._path, why)
            self.num_lost += num_calls


def _size(request: CallRequest, reply: CallReply) -> int:
    return len(request.body) + sum(len(content) for _, content in reply.parts)


def _claimed(path: Path) -> int:
    """An open file descriptor that keeps other writers away. The file is there afterwards."""
    try:
        with suppress(FileExistsError):
            create(path).close()
        lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except (OSError, sqlite3.Error) as error:
        raise InvalidInput(f"{path} cannot be written: {error}", field="file") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        hint = "end the other one first, or record into another file"
        raise InvalidInput(f"{path} is being recorded by another process", hint=hint, field="file") from None
    return lock


def _opened(path: Path) -> sqlite3.Connection:
    with closing(open_recording(path)) as reading:
        try:
            is_of_a_run = reading.execute("SELECT 1 FROM meta LIMIT 1").fetchone() is not None
        except sqlite3.Error as error:
            raise RecordingDamaged(f"{path.name} cannot be added to: {error}") from None
    if is_of_a_run:
        hint = "record calls into a file of their own"
        raise InvalidInput(f"{path} is an exported run, which never changes", hint=hint, field="file")
    try:
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
    except sqlite3.Error as error:
        raise RecordingDamaged(f"{path.name} cannot be added to: {error}") from None
    return connection


def _continued(connection: sqlite3.Connection) -> tuple[int, Counter[tuple[str, bytes]], dict[bytes, int]]:
    """The next number, the next of each request in its lane, and the statuses of what was asked by GET."""
    try:
        (last,) = connection.execute("SELECT coalesce(max(seq), 0) FROM calls").fetchone()
        ends = connection.execute("SELECT lane, digest, max(nth) + 1 FROM calls GROUP BY lane, digest")
        counts = Counter({(lane, digest): nth for lane, digest, nth in ends})
        facts = dict(connection.execute("SELECT digest, status FROM calls WHERE method = 'GET' ORDER BY seq"))
    except sqlite3.Error as error:
        raise RecordingDamaged(f"it cannot be added to: {error}") from None
    return last + 1, counts, facts
