"""Removing a segment of the journal: which removal is in progress, and what must be rewritten first.

The segment's bodies are deleted, but everything else that only its records contain must stay known. The index, built
from them, knows what that is. Each function that queries it takes its own connection, in any thread; one at a time.
"""

import logging
import sqlite3
from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

from forebay.buffer.store import index_queries
from forebay.buffer.store.abc import GroupBodies
from forebay.buffer.store.bodies import BodyReader
from forebay.buffer.store.index import batches
from forebay.buffer.store.index_rows import TABLES, Key, Table
from forebay.buffer.store.log_segments import SegmentLog
from forebay.core.errors import BodyUnreadable, StorageFailed
from forebay.core.records.log_scan import LogDamage
from forebay.core.records.rows import (
    REMOVED,
    ColumnsRow,
    Row,
    SampleRow,
    StoredSample,
    TickRow,
    to_columns,
)

ROW_BYTES = 400
"""Approximate size of a row in the log, without its longest fields."""
_LONG_FIELDS = {
    "runs": "length(document)",
    "starts": "length(document)",
    "groups": "length(detail)",
    "batches": "length(group_ids) + length(reported_ids) + length(meta_info)",
    "checkpoints": "0",
}
_COLUMNS_IN = "FROM samples WHERE written_in = ? AND written_in <> segment"

GroupKey = tuple[str, str]
"""A run and a group."""
REMEMBERED_GROUPS = 4_096
GROUPS_PER_ENTRY = 16

logger = logging.getLogger(__name__)


def bodies(connection: sqlite3.Connection, segment: int) -> list[GroupBodies]:
    """Bodies in the segment, by group."""
    cursor = connection.execute(
        "SELECT run_id, group_id, sum(num_bytes), sum(part_bytes), max(newest_at_s) FROM samples"
        " WHERE segment = ? GROUP BY 1, 2",
        (segment,),
    )
    return [GroupBodies(*values) for values in cursor]


def segments_of(connection: sqlite3.Connection, run_id: str) -> list[int]:
    """Segments in which bodies of the run were written; they may have been removed."""
    return [
        number for (number,) in connection.execute("SELECT DISTINCT segment FROM samples WHERE run_id = ?", (run_id,))
    ]


def groups(connection: sqlite3.Connection, segment: int) -> list[GroupKey]:
    """Groups named by samples with a body in the segment, in order of the samples' arrival."""
    query = "SELECT run_id, group_id FROM samples WHERE segment = ? GROUP BY 1, 2 ORDER BY min(seq)"
    return list(connection.execute(query, (segment,)))


def foreign_columns(connection: sqlite3.Connection, segment: int) -> list[tuple[str, str, int]]:
    """Run, group and segment of bodies in other segments whose columns are only in a record of ``segment``."""
    return list(connection.execute(f"SELECT run_id, group_id, segment {_COLUMNS_IN} ORDER BY seq", (segment,)))


def num_row_bytes(connection: sqlite3.Connection, segment: int) -> int:
    """Approximate number of bytes to rewrite when the segment is removed, besides bodies."""
    counted = [f"SELECT {ROW_BYTES} * count(*) + total({_LONG_FIELDS[t.name]}) {_rows_in(t)}" for t in TABLES.values()]
    counted += [
        "SELECT total(length(rows)) FROM samples WHERE segment = ?",
        f"SELECT total(length(rows)) {_COLUMNS_IN}",
    ]
    return sum(int(connection.execute(query, (segment,)).fetchone()[0]) for query in counted)


def current_rows(connection: sqlite3.Connection, segment: int) -> list[Row]:
    """Every row, except samples and their columns, whose current value is only in a record of the segment.

    Includes the active seconds of all runs: samples raise them too, and which row did so is unknown.
    """
    rows: list[Row] = []
    for table in TABLES.values():
        rows += table.find(connection, "WHERE written_in = ? ORDER BY seq", segment)
    ticks = index_queries.active_times(connection)
    return rows + [TickRow(run_id=run_id, active_s=active_s) for run_id, active_s in ticks.items()]


def is_needed(connection: sqlite3.Connection, segment: int) -> bool:
    """Whether the current value of anything is only in a record of the segment."""
    queries = [f"SELECT 1 {_rows_in(table)} LIMIT 1" for table in TABLES.values()]
    queries.append("SELECT 1 FROM samples WHERE segment = ? AND written_in = segment LIMIT 1")
    queries.append(f"SELECT 1 {_COLUMNS_IN} LIMIT 1")
    return any(connection.execute(query, (segment,)).fetchone() for query in queries)


def _rows_in(table: Table[Any]) -> str:
    return f"FROM {table.name} WHERE written_in = ?"


class Known:
    """Keys in the index behind ``connection``, looked up once."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._removed = set(self._column("SELECT run_id FROM runs WHERE state = ?", REMOVED))
        self._active = set(self._column("SELECT run_id FROM active_times"))
        self._keys: dict[tuple[str, str], set[Key]] = {}
        self._uids: dict[tuple[str, str], set[str]] = {}

    def has(self, row: Row) -> bool:
        """Whether the key of ``row`` has this or a later value, or its run was removed."""
        if row.run_id in self._removed:
            return True
        if isinstance(row, SampleRow):
            return row.uid in self._uids_of(row.run_id, row.group_id)
        if isinstance(row, ColumnsRow):
            return {sample.uid for sample in row.samples} <= self._uids_of(row.run_id, row.group_id)
        if isinstance(row, TickRow):
            return row.run_id in self._active
        table = TABLES[type(row)]
        return table.key_of(row) in self._keys_of(table, row.run_id)

    def _keys_of(self, table: Table[Any], run_id: str) -> set[Key]:
        found = self._keys.get((table.name, run_id))
        if found is None:
            found = self._keys[table.name, run_id] = table.keys(self._connection, run_id)
        return found

    def _uids_of(self, run_id: str, group_id: str) -> set[str]:
        found = self._uids.get((run_id, group_id))
        if found is None:
            if len(self._uids) >= REMEMBERED_GROUPS:
                self._uids.clear()
            # One query for all samples of a group, because the following records are mostly of the same group.
            samples = index_queries.group_samples(self._connection, run_id, group_id)
            found = self._uids[run_id, group_id] = {sample.row.uid for sample in samples}
        return found

    def _column(self, query: str, *values: object) -> list[object]:
        return [value for (value,) in self._connection.execute(query, values)]


class Addition(NamedTuple):
    """An append to be made."""

    rows: Sequence[Row]
    body: bytes | None


class Clearing:
    """Rewrites one segment's samples: groups in ``moved`` with their bodies, other groups as columns only.

    Groups in ``bare`` leave their parts and notes.
    """

    def __init__(
        self, log: SegmentLog, bodies: BodyReader, segment: int, moved: Collection[GroupKey], bare: Collection[GroupKey]
    ) -> None:
        self._log = log
        self._bodies = bodies
        self._segment = segment
        self._moved = moved
        self._bare = bare
        self._segments_of: dict[GroupKey, set[int]] = {}
        """Segments whose samples are known only from this one, by group: itself, and those whose columns it has."""

    def verify(self, connection: sqlite3.Connection) -> None:
        """Read the whole segment and compare it with the index, because anything the index lacks would be lost.

        Raises ``StorageFailed`` if it lacks anything.
        """
        known = Known(connection)
        for part in self._log.parts_of(self._segment):
            if isinstance(part, LogDamage):
                logger.warning("bytes %d to %d of segment %d are damaged", part.start, part.end, self._segment)
            records = part.records if isinstance(part, LogDamage) else (part,)
            for row in chain.from_iterable(record.rows for record in records):
                if not known.has(row):
                    raise StorageFailed(
                        f"the index lacks a {type(row).__name__} of this segment",
                        what=f"segment {self._segment} cannot be removed",
                        hint="stop the server, delete index.sqlite*, and start it again",
                    )

    def keys(self, connection: sqlite3.Connection) -> list[GroupKey]:
        """The groups for which something may have to be written."""
        for key in groups(connection, self._segment):
            self._segments_of[key] = {self._segment}
        for run_id, group_id, segment in foreign_columns(connection, self._segment):
            self._segments_of.setdefault((run_id, group_id), set()).add(segment)
        return list(self._segments_of)

    def additions(self, connection: sqlite3.Connection, keys: Sequence[GroupKey]) -> list[Addition]:
        """The appends for these groups, in order. Raises ``StorageFailed`` if a body to move is damaged."""
        made: list[Addition] = []
        columns: list[ColumnsRow] = []
        for key in keys:
            samples = index_queries.group_samples(connection, *key)
            if key in self._moved:
                made += self._moves(samples)
            columns += self._columns(key, samples)
        return made + [Addition(part, None) for part in batches(columns, GROUPS_PER_ENTRY)]

    def _moves(self, samples: Sequence[StoredSample]) -> Iterator[Addition]:
        moving = [sample for sample in samples if self._is_moved(sample)]
        try:
            # Verified while read: copying a damaged body would give the damage a new, valid checksum.
            found = self._bodies.read([sample.location for sample in moving])
        except BodyUnreadable as error:
            raise StorageFailed(
                f"a body that is still needed is damaged ({error.message})",
                what=f"segment {self._segment} cannot be removed",
                hint="the segment stays until the body's group is delivered or discarded",
            ) from error
        for sample, body in zip(moving, found, strict=True):
            yield Addition([sample.row], body)

    def _is_moved(self, sample: StoredSample) -> bool:
        row, key = sample.row, (sample.row.run_id, sample.row.group_id)
        stays = not row.is_sample and key in self._bare
        return sample.location.segment == self._segment and key in self._moved and not stays

    def _columns(self, key: GroupKey, samples: Sequence[StoredSample]) -> Iterator[ColumnsRow]:
        row = samples[0].row
        for segment in sorted(self._segments_of[key]):
            # Moved samples have new rows at the end of the log: a row without them removes the old ones.
            of_it = (sample for sample in samples if sample.location.segment == segment)
            left = [sample for sample in of_it if not self._is_moved(sample)]
            yield ColumnsRow(
                run_id=row.run_id,
                group_id=row.group_id,
                instance_id=row.instance_id,
                epoch=row.epoch,
                segment=segment,
                samples=[to_columns(sample) for sample in left],
            )
