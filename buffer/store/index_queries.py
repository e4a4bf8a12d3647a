"""Queries of the index. Each function takes its own connection, in any thread."""

# ruff: noqa: S608 - names come from our own tables, and values are always bound

import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

from forebay.buffer.store import index_rows
from forebay.buffer.store.abc import NEWEST_GROUPS
from forebay.buffer.store.index import START
from forebay.buffer.store.index_damage import IndexDamaged, checked, words_of_damage
from forebay.buffer.store.index_rows import BATCHES, CHECKPOINTS, GROUPS, RUNS, STARTS
from forebay.core.errors import ForebayError, GroupNotFound
from forebay.core.group import LIVE
from forebay.core.ids import InstanceId
from forebay.core.records.log_records import Position
from forebay.core.records.rows import BatchRow, CheckpointRow, FoundGroup, GroupRow, RunRow, StartRow, StoredSample

MAX_NUMBER = 2**63 - 1
"""Largest integer of SQLite."""

ResultT = TypeVar("ResultT")
Query = Callable[[sqlite3.Connection], ResultT]


def ask(path: Path, query: Query[ResultT]) -> ResultT:
    """Run ``query`` on the index at ``path``. Raises ``sqlite3.Error``."""
    # Read-only, and closed after each query, because an open reader prevents truncation of the WAL.
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection, words_of_damage():
        return query(connection)


def answers(connection: sqlite3.Connection, queries: Sequence[Query[Any]]) -> list[Any]:
    """The result of each query, or the ``ForebayError`` that it raised."""

    def answer(query: Query[Any]) -> Any:
        try:
            return query(connection)
        except ForebayError as error:
            return error
        finally:
            connection.rollback()  # for a query that began a transaction

    return [answer(query) for query in queries]


def runs(connection: sqlite3.Connection) -> list[RunRow]:
    """Every run with its active seconds, oldest first."""
    found = RUNS.find(connection, "ORDER BY created_at_s, seq")
    active_s = active_times(connection)  # while the rows are being read, so that both are consistent
    rows = list(found)
    for row in rows:
        if row.run_id not in active_s:
            raise IndexDamaged("a run has no active seconds")
        row.active_s = active_s[row.run_id]
    return rows


def active_times(connection: sqlite3.Connection) -> dict[str, float]:
    """Active seconds of every run."""
    found = connection.execute("SELECT run_id, active_s, checksum FROM active_times ORDER BY run_id")
    return {run_id: active_s for run_id, active_s, _ in checked(found, 2)}


def start(connection: sqlite3.Connection, run_id: str) -> StartRow | None:
    """Parameters of the run's last start; None if their record is damaged."""
    return next(STARTS.find(connection, "WHERE run_id = ?", run_id), None)


def groups(connection: sqlite3.Connection, run_id: str) -> list[GroupRow]:
    """All groups of the run, in the order in which they opened."""
    return list(GROUPS.find(connection, "WHERE run_id = ? ORDER BY number, seq", run_id))


def group_page(
    connection: sqlite3.Connection,
    run_id: str,
    *,
    state: str | None = None,
    after: str = "",
    limit: int = 100,
    newest: bool = False,
) -> list[GroupRow]:
    """Up to ``limit`` groups beyond the group ``after``. Raises ``GroupNotFound`` if that does not exist."""
    beyond, order = ("<", "DESC") if newest else (">", "ASC")
    of_state, values = ("", ()) if state is None else (" AND state = ?", (state,))
    where = f"WHERE run_id = ?{of_state} AND (number, seq) {beyond} (?, ?) ORDER BY number {order}, seq {order} LIMIT ?"
    place = _place(connection, run_id, after) if after else (MAX_NUMBER if newest else -1, 0)
    page = list(GROUPS.find(connection, where, run_id, *values, *place, limit))
    # A page that contains its own start would make a reader repeat it for ever.
    if any(row.group_id == after for row in page):
        raise IndexDamaged("a page of groups begins before its place")
    return page


def _place(connection: sqlite3.Connection, run_id: str, group_id: str) -> tuple[int, int]:
    found = connection.execute(
        "SELECT number, seq FROM groups WHERE run_id = ? AND group_id = ?", (run_id, group_id)
    ).fetchone()
    if found is None:
        raise GroupNotFound(run_id, group_id)
    return int(found[0]), int(found[1])


def live_samples(connection: sqlite3.Connection, run_id: str) -> list[StoredSample]:
    """Members of the run's live groups and their parts, in order of arrival."""
    states = sorted(LIVE)
    # CROSS JOIN fixes the order of the loops: a run's ended groups may hold many more samples than its live ones.
    cursor = connection.execute(
        f"SELECT {index_rows.SELECTION} FROM groups g CROSS JOIN samples s USING (run_id, group_id)"
        f" WHERE g.run_id = ? AND g.state IN ({', '.join('?' * len(states))}) ORDER BY s.seq",
        (run_id, *states),
    )
    return [sample for sample in index_rows.unpack(cursor) if sample.row.outcome in ("member", "part")]


def group_samples(connection: sqlite3.Connection, run_id: str, group_id: str) -> list[StoredSample]:
    """All samples that name the group, in order of arrival."""
    query = f"{index_rows.EVERYTHING} WHERE run_id = ? AND group_id = ? ORDER BY seq"
    return index_rows.unpack(connection.execute(query, (run_id, group_id)))


def samples_of(connection: sqlite3.Connection, run_id: str, group_ids: Sequence[str]) -> dict[str, list[StoredSample]]:
    """``group_samples`` for many groups, by group."""
    return {group_id: group_samples(connection, run_id, group_id) for group_id in group_ids}


def notes(connection: sqlite3.Connection, run_id: str, prefix: str, since_s: float) -> list[StoredSample]:
    """Notes of the run whose uid begins with ``prefix``, in texts with anything newer than ``since_s``."""
    # Only texts with a note are decoded: a run has far more samples.
    query = f"{index_rows.EVERYTHING} WHERE run_id = ? AND newest_at_s >= ? AND instr(rows, ?)"
    found = connection.execute(query, (run_id, since_s, index_rows.to_json(prefix)[:-1]))
    return [each for each in index_rows.unpack(found) if each.row.uid.startswith(prefix)]


def batches(connection: sqlite3.Connection, run_id: str, *, after: int = 0, limit: int | None = None) -> list[BatchRow]:
    """Up to ``limit`` batches of the run after number ``after``, ordered by number."""
    where = "WHERE run_id = ? AND number > ? ORDER BY number LIMIT ?"
    page = list(BATCHES.find(connection, where, run_id, after, -1 if limit is None else limit))
    if any(row.number <= after for row in page):  # for the same reason as in `group_page`
        raise IndexDamaged("a page of batches begins before its place")
    return page


def find_batches(connection: sqlite3.Connection, run_id: str, batch_ids: Sequence[str]) -> list[BatchRow]:
    """Those of these batches that exist."""
    one = "WHERE run_id = ? AND batch_id = ?"
    return [row for batch_id in batch_ids for row in BATCHES.find(connection, one, run_id, batch_id)]


def checkpoints(connection: sqlite3.Connection, run_id: str) -> list[CheckpointRow]:
    """All checkpoints of the run, by step."""
    return list(CHECKPOINTS.find(connection, "WHERE run_id = ? ORDER BY step", run_id))


def uids_by_group(connection: sqlite3.Connection, run_id: str, limit: int | None = None) -> dict[str, list[str]] | None:
    """Uids of the run's samples by the group they name; None if there are more than ``limit``."""
    found: dict[str, set[str]] = {}
    num_left = limit
    for values in connection.execute(f"{index_rows.EVERYTHING} WHERE run_id = ?", (run_id,)):
        group_id, uids = values[1], index_rows.uids([values])
        found.setdefault(group_id, set()).update(uids)
        if num_left is not None:
            num_left -= len(uids)
            if num_left < 0:
                return None
    return {group_id: list(uids) for group_id, uids in found.items()}


def find(
    connection: sqlite3.Connection,
    run_id: str,
    group_ids: Sequence[str],
    instance_ids: Sequence[InstanceId],
    has_uids: bool,
    up_to: Position,
) -> list[FoundGroup] | None:
    """These groups, and the newest of these instances; None if the index is not complete ``up_to`` there."""
    # One transaction: the index may be rebuilt at any time, and is incomplete meanwhile.
    connection.execute("BEGIN")
    place = next(checked(connection.execute("SELECT segment, offset, checksum FROM complete_up_to"), 2), START)
    if Position(*place[:2]) < up_to:
        return None
    rows: dict[str, GroupRow | None] = dict.fromkeys(group_ids)
    newest = f"WHERE run_id = ? AND instance_id = ? ORDER BY epoch DESC LIMIT {NEWEST_GROUPS}"
    for instance_id in instance_ids:
        found = GROUPS.find(connection, newest, run_id, index_rows.to_json(instance_id))
        rows |= {row.group_id: row for row in found}
    for group_id in group_ids:
        rows[group_id] = next(GROUPS.find(connection, "WHERE run_id = ? AND group_id = ?", run_id, group_id), None)
    query = f"{index_rows.EVERYTHING} WHERE run_id = ? AND group_id = ?"
    uids: dict[str, set[str]] = {}
    if has_uids:
        uids = {key: index_rows.uids(connection.execute(query, (run_id, key))) for key in rows}
    return [FoundGroup(key, row, list(uids.get(key, ()))) for key, row in rows.items()]


def closed_groups(connection: sqlite3.Connection, run_id: str, after: int) -> list[GroupRow]:
    """Closed groups of the run with a ``closed_seq`` above ``after``."""
    return list(GROUPS.find(connection, "WHERE run_id = ? AND closed_seq > ? ORDER BY closed_seq", run_id, after))
