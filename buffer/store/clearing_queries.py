"""What is asked of the index before a segment is removed. Each function takes a connection, in any thread."""

import sqlite3
from collections.abc import Sequence
from typing import Any

from forebay.buffer.store.abc import GroupBodies
from forebay.buffer.store.columns import Table
from forebay.buffer.store.index import BATCHES, CHECKPOINTS, GROUPS, RUNS
from forebay.buffer.store.rows import Row, TickRow

TABLES: Sequence[Table[Any]] = (RUNS, GROUPS, BATCHES, CHECKPOINTS)
ROW_BYTES = 400
"""About what a row of these takes in the log, besides its longest fields."""
_LONG_FIELDS = {
    "runs": "length(document)",
    "groups": "length(detail)",
    "batches": "length(group_ids) + length(reported_ids) + length(meta_info)",
    "checkpoints": "0",
}
_COLUMNS_IN = "FROM samples WHERE written_in = ? AND written_in <> segment"

GroupKey = tuple[str, str]
"""A run and a group."""


def bodies(connection: sqlite3.Connection, segment: int) -> list[GroupBodies]:
    """What of each group lies in the segment."""
    cursor = connection.execute(
        "SELECT run_id, group_id, sum(num_bytes), max(newest_at_s) FROM samples WHERE segment = ? GROUP BY 1, 2",
        (segment,),
    )
    return [GroupBodies(*values) for values in cursor]


def groups(connection: sqlite3.Connection, segment: int) -> list[GroupKey]:
    """The groups that samples with a body in the segment name, in the order in which the samples came."""
    query = "SELECT run_id, group_id FROM samples WHERE segment = ? GROUP BY 1, 2 ORDER BY min(seq)"
    return list(connection.execute(query, (segment,)))


def foreign_columns(connection: sqlite3.Connection, segment: int) -> list[tuple[str, str, int]]:
    """Run, group and segment of bodies of whose samples only a record in ``segment`` tells, which has other bodies."""
    return list(connection.execute(f"SELECT run_id, group_id, segment {_COLUMNS_IN} ORDER BY seq", (segment,)))


def num_row_bytes(connection: sqlite3.Connection, segment: int) -> int:
    """About how much must be written again when the segment is removed, besides bodies."""
    counted = [f"SELECT {ROW_BYTES} * count(*) + total({_LONG_FIELDS[t.name]}) {_rows_in(t)}" for t in TABLES]
    counted += [
        "SELECT total(length(rows)) FROM samples WHERE segment = ?",
        f"SELECT total(length(rows)) {_COLUMNS_IN}",
    ]
    return sum(int(connection.execute(query, (segment,)).fetchone()[0]) for query in counted)


def current_rows(connection: sqlite3.Connection, segment: int) -> list[Row]:
    """Every row, but samples and their columns, whose present value only a record in the segment tells.

    The active seconds of all runs are among them: samples tell of them, too, and ticks are not told apart.
    """
    rows: list[Row] = []
    for table in TABLES:
        cursor = connection.execute(f"SELECT {table.selection('t')} {_rows_in(table)} ORDER BY seq", (segment,))
        rows += [table.from_values(values) for values in cursor]
    ticks = connection.execute("SELECT run_id, active_s FROM active_times ORDER BY run_id")
    return rows + [TickRow(run_id=run_id, active_s=active_s) for run_id, active_s in ticks]


def is_needed(connection: sqlite3.Connection, segment: int) -> bool:
    """Whether the present value of anything is told by nothing but a record in the segment."""
    queries = [f"SELECT 1 {_rows_in(table)} LIMIT 1" for table in TABLES]
    queries.append("SELECT 1 FROM samples WHERE segment = ? AND written_in = segment LIMIT 1")
    queries.append(f"SELECT 1 {_COLUMNS_IN} LIMIT 1")
    return any(connection.execute(query, (segment,)).fetchone() for query in queries)


def _rows_in(table: Table[Any]) -> str:
    return f"FROM {table.name} t WHERE written_in = ?"
