"""What is asked of the index. Each function takes a connection of its own, in any thread."""

# ruff: noqa: S608 - names come from our own tables, and values are always bound

import sqlite3
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TypeVar

from forebay.buffer.store import index_rows
from forebay.buffer.store.index import BATCHES, CHECKPOINTS, GROUPS, RUNS
from forebay.buffer.store.index_rows import Values
from forebay.buffer.store.rows import BatchRow, CheckpointRow, GroupRow, RunRow, StoredSample
from forebay.core.errors import GroupNotFound
from forebay.core.group import LIVE

ResultT = TypeVar("ResultT")
Query = Callable[[sqlite3.Connection], ResultT]


def ask(path: Path, query: Query[ResultT]) -> ResultT:
    """The answer of the index at ``path``. Raises ``sqlite3.Error``."""
    # Read-only, and closed after each question: an open reader keeps the WAL from being cut short.
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
        return query(connection)


def runs(connection: sqlite3.Connection) -> list[RunRow]:
    """Every run with its active seconds, oldest first."""
    cursor = connection.execute(
        f"SELECT {RUNS.selection('r')}, a.active_s FROM runs r JOIN active_times a USING (run_id)"
        " ORDER BY r.created_at_s, r.seq"
    )
    found = []
    for values in cursor:
        row = RUNS.from_values(values)
        row.active_s = values[-1]
        found.append(row)
    return found


def groups(connection: sqlite3.Connection, run_id: str) -> list[GroupRow]:
    """Every group of the run in the order in which they opened."""
    cursor = connection.execute(
        f"SELECT {GROUPS.selection('g')} FROM groups g WHERE run_id = ? ORDER BY number, seq", (run_id,)
    )
    return [GROUPS.from_values(values) for values in cursor]


def group_page(
    connection: sqlite3.Connection, run_id: str, state: str | None, after: str, limit: int
) -> list[GroupRow]:
    """Up to ``limit`` groups behind the group ``after``. Raises ``GroupNotFound`` when there is no such group."""
    cursor = connection.execute(
        f"SELECT {GROUPS.selection('g')} FROM groups g"
        " WHERE run_id = ? AND (number, seq) > (?, ?) AND (? IS NULL OR state = ?) ORDER BY number, seq LIMIT ?",
        (run_id, *_place(connection, run_id, after), state, state, limit),
    )
    return [GROUPS.from_values(values) for values in cursor]


def _place(connection: sqlite3.Connection, run_id: str, group_id: str) -> tuple[int, int]:
    if not group_id:
        return (-1, 0)
    found = connection.execute(
        "SELECT number, seq FROM groups WHERE run_id = ? AND group_id = ?", (run_id, group_id)
    ).fetchone()
    if found is None:
        raise GroupNotFound(run_id, group_id)
    return int(found[0]), int(found[1])


def live_samples(connection: sqlite3.Connection, run_id: str) -> list[StoredSample]:
    """The members of the run's live groups in the order in which they came."""
    states = sorted(LIVE)
    # CROSS JOIN fixes the order of the loops: a run's dead groups can hold many more samples than its live ones.
    cursor = connection.execute(
        "SELECT s.rows FROM groups g CROSS JOIN samples s USING (run_id, group_id)"
        f" WHERE g.run_id = ? AND g.state IN ({', '.join('?' * len(states))}) ORDER BY s.seq",
        (run_id, *states),
    )
    return [sample for sample in _unpacked(cursor) if sample.row.outcome == "member"]


def group_samples(connection: sqlite3.Connection, run_id: str, group_id: str) -> list[StoredSample]:
    """Every sample that names the group, in the order in which they came."""
    query = "SELECT rows FROM samples WHERE run_id = ? AND group_id = ? ORDER BY seq"
    return _unpacked(connection.execute(query, (run_id, group_id)))


def samples_of(connection: sqlite3.Connection, run_id: str, group_ids: Sequence[str]) -> dict[str, list[StoredSample]]:
    """The same for many groups, by group."""
    return {group_id: group_samples(connection, run_id, group_id) for group_id in group_ids}


def batches(connection: sqlite3.Connection, run_id: str) -> list[BatchRow]:
    """Every batch of the run in the order of their numbers."""
    cursor = connection.execute(
        f"SELECT {BATCHES.selection('b')} FROM batches b WHERE run_id = ? ORDER BY number", (run_id,)
    )
    return [BATCHES.from_values(values) for values in cursor]


def checkpoints(connection: sqlite3.Connection, run_id: str) -> list[CheckpointRow]:
    """Every checkpoint of the run by step."""
    cursor = connection.execute(
        f"SELECT {CHECKPOINTS.selection('c')} FROM checkpoints c WHERE run_id = ? ORDER BY step", (run_id,)
    )
    return [CHECKPOINTS.from_values(values) for values in cursor]


def _unpacked(cursor: Iterable[Values]) -> list[StoredSample]:
    return index_rows.unpack(text for (text,) in cursor)


def uids(connection: sqlite3.Connection, run_id: str) -> list[str]:
    """The uid of every sample of the run."""
    cursor = connection.execute("SELECT rows FROM samples WHERE run_id = ?", (run_id,))
    return list(index_rows.uids(text for (text,) in cursor))
