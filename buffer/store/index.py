"""The SQLite index: the log's contents, ready for queries. It can be deleted at any time.

It follows the log asynchronously, at most ``BACKLOG_ENTRIES`` behind, and stores the position up to which it is
complete: the rest is read from the log. All of this runs in the writer's thread; ``index_queries`` reads it.
"""

import itertools
import logging
import os
import sqlite3
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from xxhash import xxh3_64_intdigest

from forebay.buffer.store import index_damage, index_rows
from forebay.buffer.store.index_damage import IndexDamaged, checked, checksum, is_damage
from forebay.buffer.store.index_rows import BATCHES, CHECKPOINTS, GROUPS, RUNS, STARTS, TABLES, IndexUpdate
from forebay.buffer.store.log_segments import SegmentLog
from forebay.core.files import opener
from forebay.core.records.log_records import LogEntry, Position
from forebay.core.records.rows import REMOVED, Location, Row, RunRow

SCHEMA = (
    RUNS.schema,
    STARTS.schema,
    GROUPS.schema,
    "CREATE INDEX groups_by_number ON groups (run_id, number)",
    "CREATE INDEX groups_by_state ON groups (run_id, state, number)",
    "CREATE INDEX groups_by_instance ON groups (run_id, instance_id, epoch)",
    BATCHES.schema,
    "CREATE INDEX batches_by_number ON batches (run_id, number)",
    CHECKPOINTS.schema,
    *index_rows.SCHEMA,
    # Not in the runs table, because a tick may arrive before the row of its run.
    "CREATE TABLE active_times (run_id TEXT PRIMARY KEY, active_s REAL NOT NULL, checksum INTEGER) WITHOUT ROWID",
    "CREATE TABLE complete_up_to"
    " (only INTEGER PRIMARY KEY CHECK (only = 0), segment INTEGER, offset INTEGER, checksum INTEGER)",
)
SCHEMA_VERSION = xxh3_64_intdigest("\n".join(SCHEMA).encode()) & 0x7FFFFFFF
"""Derived from the schema: an index with a different schema is rebuilt."""

START = Position(0, 0)
ROWS_PER_STATEMENT = 64
BACKLOG_ENTRIES = 4096
"""Number of waiting entries at which a commit waits for the index."""
SLICE_ENTRIES = 512
CATCH_UP_ENTRIES = 4096

logger = logging.getLogger(__name__)

WAL_PAGES = 8192
_PRAGMAS = (
    "journal_mode = WAL",
    "synchronous = NORMAL",
    "cell_size_check = ON",
    "cache_size = -32768",
    # 32 MB of WAL: a checkpoint waits for the disk, and commits of the log wait for it.
    f"wal_autocheckpoint = {WAL_PAGES}",
)


class Index:
    """The writing side of the index. Used from one thread; raises ``sqlite3.Error``.

    ``position`` is the log position up to which it is complete, ``num_builds`` counts the files started.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.position = START
        self.num_builds = 0
        self._connection: sqlite3.Connection | None = None

    def open(self) -> None:
        """Open and verify the file; start an empty one if it is missing, damaged or has another schema."""
        try:
            with index_damage.words_of_damage():
                self._open()
        except sqlite3.DatabaseError as error:
            if not is_damage(error, self.path):
                raise
            self.replace(str(error))

    def _open(self) -> None:
        index_damage.check_is_file(self.path)
        self._connect()
        if self._version() == SCHEMA_VERSION:
            self._verify()
            self.position = self._stored_position()
        else:
            self.clear()

    def _verify(self) -> None:
        """Raise ``IndexDamaged`` unless the whole file is intact. Takes two seconds for a million samples.

        SQLite's check finds damaged pages; the rows' checksums find changed values.
        """
        connection = self._require()
        [(found,)] = connection.execute("PRAGMA integrity_check(1)")
        if found != "ok":
            raise IndexDamaged(found)
        statements = connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY rowid")
        if tuple(sql for (sql,) in statements) != SCHEMA:
            raise IndexDamaged("its tables do not match its version")
        for table in TABLES.values():
            exhaust(table.checked(connection))
        exhaust(index_rows.checked_samples(connection.execute(index_rows.EVERYTHING)))
        exhaust(checked(connection.execute("SELECT run_id, active_s, checksum FROM active_times"), 2))

    def _stored_position(self) -> Position:
        rows = self._require().execute("SELECT segment, offset, checksum FROM complete_up_to")
        for segment, offset, _ in checked(rows, 2):
            return Position(segment, offset)
        raise IndexDamaged("it does not say up to which position it is complete")

    def replace(self, reason: str) -> None:
        """Set a damaged file aside and start an empty one."""
        logger.error("the index is damaged (%s) and is rebuilt from the log", reason)
        self.close()
        index_damage.set_aside(self.path)
        self.clear()

    def clear(self) -> None:
        """Delete the file and start an empty one."""
        self.num_builds += 1
        self.close()
        index_damage.delete(self.path)
        connection = self._connect()
        connection.execute("BEGIN")
        for statement in SCHEMA:
            connection.execute(statement)
        connection.execute("INSERT INTO complete_up_to VALUES (0, ?, ?, ?)", (*START, checksum(START)))
        # In one transaction with the tables: a kill in between leaves a file that counts as having another schema.
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        connection.execute("COMMIT")
        self.position = START

    def close(self) -> None:
        """Close the file. Ignores errors, because nothing depends on it."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(sqlite3.Error):
                connection.close()

    def save_room(self) -> None:
        """Keep the WAL as small as possible because the disk is full."""
        with suppress(OSError):  # best effort
            index_damage.delete_set_aside(self.path)
        with suppress(sqlite3.Error):
            self._require().execute("PRAGMA wal_autocheckpoint = 64")
            self._require().execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def take_room(self) -> None:
        """Let the WAL grow again."""
        with suppress(sqlite3.Error):
            self._require().execute(f"PRAGMA wal_autocheckpoint = {WAL_PAGES}")

    def apply(self, records: Iterable[tuple[Sequence[Row], Location | None, int]], end: Position) -> None:
        """Add ``records``, each with its segment and reaching up to ``end``, in one transaction."""
        update = IndexUpdate()
        for rows, location, segment in records:
            update.add(rows, location, segment)
        connection = self._require()
        # Takes the write lock at once: a transaction that begins by reading may fail at its first write.
        connection.execute("BEGIN IMMEDIATE")
        try:
            self._write(connection, update)
            # In the same transaction as the rows, so that a crash cannot separate them.
            connection.execute("UPDATE complete_up_to SET segment = ?, offset = ?, checksum = ?", (*end, checksum(end)))
            connection.execute("COMMIT")
        except BaseException:  # includes a cancellation: no transaction may stay open
            with suppress(sqlite3.Error):  # the first error is the one to report
                connection.execute("ROLLBACK")
            raise
        self.position = end

    def _write(self, connection: sqlite3.Connection, update: IndexUpdate) -> None:
        # First the state at opening, then the current one: `seq` must be that of the opening.
        _write_rows(connection, GROUPS.insert_missing, map(GROUPS.to_values, update.opened.values()))
        for row_type, rows in update.rows.items():
            table = TABLES[row_type]
            _write_rows(connection, table.upsert, map(table.to_values, rows.values()))
        self._write_active(connection, update)
        _write_rows(
            connection, index_rows.insert, (index_rows.to_values(key, part) for key, part in update.samples.items())
        )
        # Rewritten columns replace the rows of their segment, including those from this very batch.
        connection.executemany(index_rows.DELETE, update.columns)
        kept = ((row, segment) for row, segment in update.columns.values() if row.samples)
        _write_rows(
            connection, index_rows.insert, (index_rows.columns_to_values(row, segment) for row, segment in kept)
        )
        removed = [(row.run_id,) for row, _ in update.rows[RunRow].values() if row.state == REMOVED]
        for name in ("samples", *(table.name for table in TABLES.values() if table is not RUNS)):
            connection.executemany(f"DELETE FROM {name} WHERE run_id = ?", removed)  # noqa: S608 - names of ours

    def _write_active(self, connection: sqlite3.Connection, update: IndexUpdate) -> None:
        for run_id, change in update.active.items():
            seconds = change.seconds + 0.0
            if not change.is_set:
                query = "SELECT run_id, active_s, checksum FROM active_times WHERE run_id = ?"
                found = connection.execute(query, (run_id,))
                seconds = max([seconds, *(known_s for _, known_s, _ in checked(found, 2))])
            row = (run_id, seconds)
            connection.execute("INSERT OR REPLACE INTO active_times VALUES (?, ?, ?)", (*row, checksum(row)))

    def _connect(self) -> sqlite3.Connection:
        os.close(opener(str(self.path), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC))  # the WAL inherits its permissions
        # None: otherwise Python's module would begin its own transactions.
        connection = sqlite3.connect(self.path, isolation_level=None, cached_statements=256)
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
    """Brings durable entries into the index. Used from the writer's thread; raises ``sqlite3.Error``."""

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
        """Whether the backlog is so large that feeding cannot be postponed."""
        return len(self._backlog) >= BACKLOG_ENTRIES

    def open(self) -> None:
        """Open the index and bring it up to date from the log."""
        self._index.open()
        # A power cut may cost the index its last commits, never the log, so the log was replaced or cut by hand.
        if self._index.position != START and not self._log.holds(self._index.position):
            logger.warning("the index is ahead of the log and is rebuilt")
            self._index.clear()
        self._mending(self._catch_up)

    @property
    def position(self) -> Position:
        """The log position up to which the index is complete."""
        return self._index.position

    @property
    def num_builds(self) -> int:
        """How often the index was started from empty. Callable from any thread."""
        return self._index.num_builds

    def rebuild(self, reason: str) -> None:
        """Set the damaged index aside and read the whole log."""
        self._index.replace(reason)
        self._catch_up()
        logger.warning("the index is rebuilt")

    def _mending(self, work: Callable[[], None]) -> None:
        """Do ``work`` on the index; rebuild the index if it proves damaged."""
        try:
            with index_damage.words_of_damage():
                work()
        except sqlite3.DatabaseError as error:
            if not is_damage(error, self._index.path):
                raise
            self.rebuild(str(error))

    def _catch_up(self) -> None:
        self._backlog.clear()
        for records in batches(self._log.scan(self._index.position), CATCH_UP_ENTRIES):
            self._index.apply(
                [(record.rows, record.location, record.end.segment) for record in records], records[-1].end
            )
        # A tail of damaged records has no rows, and need not be scanned again.
        if self._index.position != self._log.end:
            self._index.apply([], self._log.end)

    def add(self, entries: Sequence[LogEntry], locations: Sequence[Location | None]) -> None:
        """Add entries that the log has confirmed."""
        end = self._log.end
        self._backlog.extend(
            _Waiting(entry.rows, location, end) for entry, location in zip(entries, locations, strict=True)
        )

    def feed(self) -> None:
        """Bring one slice into the index, in whole commits only, so that its position is exact."""
        if not self._backlog:
            return
        taken: list[_Waiting] = []
        # Entries of one commit share its end: with half of them in, the index would skip the rest after a crash.
        while self._backlog and (len(taken) < SLICE_ENTRIES or self._backlog[0].end == taken[-1].end):
            taken.append(self._backlog.popleft())
        entries = [(each.rows, each.location, each.end.segment) for each in taken]
        try:
            self._mending(partial(self._index.apply, entries, taken[-1].end))
        except sqlite3.Error:
            self._backlog.extendleft(reversed(taken))
            raise

    def flush(self) -> None:
        """Bring everything into the index."""
        while self._backlog:
            self.feed()

    def save_room(self) -> None:
        """Keep the index as small as possible."""
        self._index.save_room()

    def take_room(self) -> None:
        """Let the index grow again."""
        self._index.take_room()

    def forget(self) -> None:
        """Drop the backlog; ``open`` will read it from the log again."""
        self._backlog.clear()

    def close(self) -> None:
        """Close the index."""
        self._index.close()


def _write_rows(
    connection: sqlite3.Connection, statement: Callable[[int], str], rows: Iterable[Sequence[object]]
) -> None:
    """Write many rows per statement, because each statement releases and must regain the interpreter's lock."""
    for part in batches(rows, ROWS_PER_STATEMENT):
        connection.execute(statement(len(part)), list(itertools.chain.from_iterable(part)))


def exhaust(items: Iterable[object]) -> None:
    """Iterate over all items and keep none."""
    deque(items, maxlen=0)


def batches(items: Iterable[Any], size: int) -> Iterable[list[Any]]:
    """Split ``items`` into lists of ``size``."""
    iterator = iter(items)
    while batch := list(itertools.islice(iterator, size)):
        yield batch
