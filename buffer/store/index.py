"""The SQLite index: what the log says, ready for queries. It can be deleted at any time.

Many records as few changes: what the index does for a batch.
"""

import itertools
import sqlite3
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from forebay.buffer.store import index_rows
from forebay.buffer.store.index_rows import Table
from forebay.buffer.store.log_records import Position
from forebay.buffer.store.rows import (
    BatchRow,
    CheckpointRow,
    ColumnsRow,
    GroupRow,
    Location,
    Row,
    RunRow,
    SampleRow,
    TickRow,
)
from forebay.core.group import GroupState


def implied_group(row: SampleRow) -> GroupRow:
    """The group that a member opens when it has no row of its own yet."""
    return GroupRow(
        run_id=row.run_id,
        group_id=row.group_id,
        instance_id=row.instance_id,
        epoch=row.epoch,
        state=GroupState.OPEN,
        opened_s=row.at_s,
        number=row.group_number,
    )


class ActiveTime(NamedTuple):
    """A change of a run's active seconds: to ``seconds``, or only up to them."""

    seconds: float
    is_set: bool


class Fold:
    """The changes of several records, each key once, in the order in which the keys came.

    Beside each row stands the segment in which it was found.
    """

    def __init__(self) -> None:
        self.runs: dict[str, tuple[RunRow, int]] = {}
        self.active: dict[str, ActiveTime] = {}
        self.opened: dict[tuple[str, str], tuple[GroupRow, int]] = {}
        """Groups as they were first seen."""
        self.groups: dict[tuple[str, str], tuple[GroupRow, int]] = {}
        """Groups that have a row of their own, as they were last."""
        self.samples: dict[tuple[str, str, int], list[tuple[SampleRow, Location]]] = {}
        """By the group that they name, and the segment."""
        self.columns: dict[tuple[str, str, int], tuple[ColumnsRow, int]] = {}
        self.batches: dict[tuple[str, str], tuple[BatchRow, int]] = {}
        self.checkpoints: dict[tuple[str, int], tuple[CheckpointRow, int]] = {}

    def add(self, rows: Iterable[Row], location: Location | None, segment: int) -> None:
        """Take in one record of ``segment``."""
        for row in rows:
            if isinstance(row, SampleRow):
                assert location is not None
                self._add_sample(row, location)
            elif isinstance(row, GroupRow):
                self.opened.setdefault((row.run_id, row.group_id), (row, segment))
                self.groups[row.run_id, row.group_id] = row, segment
            elif isinstance(row, RunRow):
                self.runs[row.run_id] = row, segment
                self._raise_active(row.run_id, row.active_s)
            elif isinstance(row, TickRow):
                self.active[row.run_id] = ActiveTime(row.active_s, is_set=True)
            elif isinstance(row, BatchRow):
                self.batches[row.run_id, row.batch_id] = row, segment
            elif isinstance(row, CheckpointRow):
                self.checkpoints[row.run_id, row.step] = row, segment
            else:
                self._add_columns(row, segment)

    def _add_sample(self, row: SampleRow, location: Location) -> None:
        key = (row.run_id, row.group_id)
        self.samples.setdefault((*key, location.segment), []).append((row, location))
        self._raise_active(row.run_id, row.at_s)
        if row.outcome == "member" and key not in self.opened:
            self.opened[key] = implied_group(row), location.segment

    def _add_columns(self, row: ColumnsRow, segment: int) -> None:
        key = (row.run_id, row.group_id, row.segment)
        self.samples.pop(key, None)  # they are among its own
        self.columns[key] = row, segment

    def _raise_active(self, run_id: str, seconds: float) -> None:
        known = self.active.get(run_id)
        if known is None:
            self.active[run_id] = ActiveTime(seconds, is_set=False)
        elif seconds > known.seconds:
            self.active[run_id] = ActiveTime(seconds, known.is_set)


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
CORRUPT_CODES = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
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
                self.position = self._load_position()
            else:
                self.clear()
        except sqlite3.DatabaseError as error:
            if not is_corrupt(error):
                raise
            self.clear()

    def clear(self) -> None:
        """Delete the file and begin an empty one."""
        self.close()
        for suffix in ("", "-wal", "-shm"):
            Path(f"{self._path}{suffix}").unlink(missing_ok=True)
        connection = self._connect()
        connection.execute("BEGIN")
        for statement in SCHEMA:
            connection.execute(statement)
        connection.execute("INSERT INTO complete_up_to VALUES (0, ?, ?)", START)
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
        connection.execute("BEGIN IMMEDIATE")
        try:
            self._write(connection, fold)
            connection.execute("UPDATE complete_up_to SET segment = ?, offset = ?", end)
            connection.execute("COMMIT")
        except BaseException:  # also a cancellation: no transaction may stay open
            with suppress(sqlite3.Error):  # the first error is the one to tell
                connection.execute("ROLLBACK")
            raise
        self.position = end

    def _write(self, connection: sqlite3.Connection, fold: Fold) -> None:
        _write_rows(connection, RUNS.upsert, map(RUNS.to_values, fold.runs.values()))
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
        connection.executemany(index_rows.DELETE, fold.columns)
        kept = ((row, segment) for row, segment in fold.columns.values() if row.samples)
        _write_rows(
            connection, index_rows.insert, (index_rows.columns_to_values(row, segment) for row, segment in kept)
        )

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, isolation_level=None, cached_statements=256)
        self._connection = connection
        for pragma in _PRAGMAS:
            connection.execute(f"PRAGMA {pragma}")
        return connection

    def _version(self) -> int:
        return int(self._require().execute("PRAGMA user_version").fetchone()[0])

    def _load_position(self) -> Position:
        return Position(*self._require().execute("SELECT segment, offset FROM complete_up_to").fetchone())

    def _require(self) -> sqlite3.Connection:
        if self._connection is None:
            raise sqlite3.OperationalError("the index is not open")
        return self._connection


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
