"""The SQLite index: what the log says, ready for queries. It can be deleted at any time.

It follows the log off the path of the commits, as far behind as ``BACKLOG_ENTRIES``, and says itself up to where it is
complete: what it lacks is read from the log. Everything here runs in the writer's thread; ``index_queries`` reads it.
"""

import itertools
import logging
import sqlite3
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from forebay.buffer.store import index_rows
from forebay.buffer.store.index_rows import Fold, Table
from forebay.buffer.store.log_records import LogEntry, Position
from forebay.buffer.store.log_segments import SegmentLog
from forebay.buffer.store.rows import (
    BatchRow,
    CheckpointRow,
    GroupRow,
    Location,
    Row,
    RunRow,
)

RUNS = Table("runs", RunRow, key=("run_id",))
GROUPS = Table("groups", GroupRow, key=("run_id", "group_id"))
BATCHES = Table("batches", BatchRow, key=("run_id", "batch_id"))
CHECKPOINTS = Table("checkpoints", CheckpointRow, key=("run_id", "step"))

SCHEMA = (
    RUNS.schema,
    GROUPS.schema,
    "CREATE INDEX groups_by_number ON groups (run_id, number)",
    BATCHES.schema,
    CHECKPOINTS.schema,
    *index_rows.SCHEMA,
    # Apart from the runs, because a tick may come before the row of its run.
    "CREATE TABLE active_times (run_id TEXT PRIMARY KEY, active_s REAL NOT NULL) WITHOUT ROWID",
    "CREATE TABLE complete_up_to (only INTEGER PRIMARY KEY CHECK (only = 0), segment INTEGER, offset INTEGER)",
)
SCHEMA_VERSION = zlib.crc32("\n".join(SCHEMA).encode()) & 0x7FFFFFFF
"""Follows from the schema: an index of any other schema is built anew."""

START = Position(0, 0)
ROWS_PER_STATEMENT = 64
BACKLOG_ENTRIES = 4096
"""With so many entries waiting, a commit waits for the index."""
SLICE_ENTRIES = 512
CATCH_UP_ENTRIES = 4096

CORRUPT_CODES = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
logger = logging.getLogger(__name__)

_PRAGMAS = (
    "journal_mode = WAL",
    "synchronous = NORMAL",
    "cache_size = -32768",
    # 32 MB of WAL: a checkpoint waits for the disk, and commits of the log wait for it.
    "wal_autocheckpoint = 8192",
)


def is_corrupt(error: BaseException) -> bool:
    """Whether ``error`` says that the index file itself is damaged."""
    return isinstance(error, sqlite3.DatabaseError) and getattr(error, "sqlite_errorcode", 0) & 0xFF in CORRUPT_CODES


class Index:
    """The writing side of the index. Used from one thread; raises ``sqlite3.Error``.

    ``position`` is the place in the log up to which it is complete.
    """

    def __init__(self, path: Path) -> None:
        self.position = START
        self._path = path
        self._connection: sqlite3.Connection | None = None

    def open(self) -> None:
        """Open the file; begin an empty one if it is missing, damaged or of another schema."""
        try:
            self._connect()
            if self._version() == SCHEMA_VERSION:
                found = self._require().execute("SELECT segment, offset FROM complete_up_to").fetchone()
                self.position = Position(*found)
            else:
                self.clear()
        except sqlite3.DatabaseError as error:
            if not is_corrupt(error):
                raise
            self.clear()

    def clear(self) -> None:
        """Delete the file and begin an empty one."""
        self.close()
        # A WAL that is left beside a new file would be replayed into it.
        for suffix in ("", "-wal", "-shm"):
            Path(f"{self._path}{suffix}").unlink(missing_ok=True)
        connection = self._connect()
        connection.execute("BEGIN")
        for statement in SCHEMA:
            connection.execute(statement)
        connection.execute("INSERT INTO complete_up_to VALUES (0, ?, ?)", START)
        # With the tables in one transaction: a kill in between leaves a file that counts as of another schema.
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        connection.execute("COMMIT")
        self.position = START

    def close(self) -> None:
        """Close the file; fails silently, since nothing depends on it."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(sqlite3.Error):
                connection.close()

    def apply(self, records: Iterable[tuple[Sequence[Row], Location | None, int]], end: Position) -> None:
        """Take in ``records``, each with its segment, which reach up to ``end``, in one transaction."""
        fold = Fold()
        for rows, location, segment in records:
            fold.add(rows, location, segment)
        connection = self._require()
        # The write lock at once: a transaction that begins by reading may fail when it is to write.
        connection.execute("BEGIN IMMEDIATE")
        try:
            self._write(connection, fold)
            # In the same transaction as the rows, so that a crash leaves no doubt about what is in.
            connection.execute("UPDATE complete_up_to SET segment = ?, offset = ?", end)
            connection.execute("COMMIT")
        except BaseException:  # also a cancellation: no transaction may stay open
            with suppress(sqlite3.Error):  # the first error is the one to tell
                connection.execute("ROLLBACK")
            raise
        self.position = end

    def _write(self, connection: sqlite3.Connection, fold: Fold) -> None:
        _write_rows(connection, RUNS.upsert, map(RUNS.to_values, fold.runs.values()))
        # First as they opened, then as they are: `seq` must be that of their opening.
        _write_rows(connection, GROUPS.insert_missing, map(GROUPS.to_values, fold.opened.values()))
        _write_rows(connection, GROUPS.upsert, map(GROUPS.to_values, fold.groups.values()))
        _write_rows(connection, BATCHES.upsert, map(BATCHES.to_values, fold.batches.values()))
        _write_rows(connection, CHECKPOINTS.upsert, map(CHECKPOINTS.to_values, fold.checkpoints.values()))
        connection.executemany(
            "INSERT INTO active_times VALUES (?, ?) ON CONFLICT (run_id) DO UPDATE"
            " SET active_s = iif(?, excluded.active_s, max(active_s, excluded.active_s))",
            [(run_id, change.seconds, change.is_set) for run_id, change in fold.active.items()],
        )
        _write_rows(
            connection, index_rows.insert, (index_rows.to_values(key, part) for key, part in fold.samples.items())
        )
        # Columns written again replace the rows of their segment, among them those that came with this very batch.
        connection.executemany(index_rows.DELETE, fold.columns)
        kept = ((row, segment) for row, segment in fold.columns.values() if row.samples)
        _write_rows(
            connection, index_rows.insert, (index_rows.columns_to_values(row, segment) for row, segment in kept)
        )

    def _connect(self) -> sqlite3.Connection:
        # None: Python's module would begin transactions of its own.
        connection = sqlite3.connect(self._path, isolation_level=None, cached_statements=256)
        self._connection = connection
        for pragma in _PRAGMAS:
            connection.execute(f"PRAGMA {pragma}")
        return connection

    def _version(self) -> int:
        return int(self._require().execute("PRAGMA user_version").fetchone()[0])

    def _require(self) -> sqlite3.Connection:
        if self._connection is None:
            raise sqlite3.OperationalError("the index is not open")
        return self._connection


class _Waiting(msgspec.Struct, frozen=True, gc=False):
    rows: Sequence[Row]
    location: Location | None
    end: Position


class Feeder:
    """Durable entries on their way into the index. Used from the writer's thread; raises ``sqlite3.Error``."""

    def __init__(self, log: SegmentLog, index: Index) -> None:
        self._log = log
        self._index = index
        self._backlog: deque[_Waiting] = deque()

    @property
    def has_backlog(self) -> bool:
        """Whether the index is behind the log."""
        return bool(self._backlog)

    @property
    def is_pressing(self) -> bool:
        """Whether so much waits that feeding cannot be put off."""
        return len(self._backlog) >= BACKLOG_ENTRIES

    def open(self) -> None:
        """Open the index and bring it up to date from the log."""
        self._index.open()
        # A power cut may cost the index its last commits, never the log: this one has been replaced, or cut by hand.
        if self._index.position != START and not self._log.holds(self._index.position):
            logger.warning("the index is ahead of the log; building it anew")
            self._index.clear()
        try:
            self._catch_up()
        except sqlite3.DatabaseError as error:
            if not is_corrupt(error):
                raise
            self.rebuild()

    def rebuild(self) -> None:
        """Throw the index away and read the whole log."""
        logger.warning("building the index anew from the log")
        self._index.clear()
        self._catch_up()

    def _catch_up(self) -> None:
        self._backlog.clear()
        for records in batches(self._log.scan(self._index.position), CATCH_UP_ENTRIES):
            self._index.apply(
                [(record.rows, record.location, record.end.segment) for record in records], records[-1].end
            )
        # A tail of damaged records has no rows, and is not to be looked at again.
        if self._index.position != self._log.end:
            self._index.apply([], self._log.end)

    def add(self, entries: Sequence[LogEntry], locations: Sequence[Location | None]) -> None:
        """Take in entries that the log has confirmed."""
        end = self._log.end
        self._backlog.extend(
            _Waiting(entry.rows, location, end) for entry, location in zip(entries, locations, strict=True)
        )

    def feed(self) -> None:
        """Bring one slice into the index; whole commits only, so that its position is exact."""
        if not self._backlog:
            return
        taken: list[_Waiting] = []
        # Entries of one commit share its end: half of them in, the index would skip the others after a crash.
        while self._backlog and (len(taken) < SLICE_ENTRIES or self._backlog[0].end == taken[-1].end):
            taken.append(self._backlog.popleft())
        try:
            self._index.apply([(each.rows, each.location, each.end.segment) for each in taken], taken[-1].end)
        except sqlite3.DatabaseError as error:
            if not is_corrupt(error):
                raise
            self.rebuild()

    def flush(self) -> None:
        """Bring everything into the index."""
        while self._backlog:
            self.feed()

    def forget(self) -> None:
        """Drop what waits; ``open`` will read it from the log again."""
        self._backlog.clear()

    def close(self) -> None:
        """Close the index."""
        self._index.close()


def _write_rows(
    connection: sqlite3.Connection, statement: Callable[[int], str], rows: Iterable[Sequence[object]]
) -> None:
    """Many rows to a statement: each statement gives up the interpreter's lock once, and has to win it back."""
    for part in batches(rows, ROWS_PER_STATEMENT):
        connection.execute(statement(len(part)), list(itertools.chain.from_iterable(part)))


def batches(items: Iterable[Any], size: int) -> Iterable[list[Any]]:
    """``items`` in lists of ``size``."""
    iterator = iter(items)
    while batch := list(itertools.islice(iterator, size)):
        yield batch
