"""Whether the index has what a record of the log tells."""

import sqlite3

from forebay.buffer.store import queries
from forebay.buffer.store.rows import BatchRow, CheckpointRow, ColumnsRow, GroupRow, Row, RunRow, SampleRow

REMEMBERED_GROUPS = 4_096


class Known:
    """Keys that the index behind ``connection`` has, looked up once."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._runs = set(self._column("SELECT run_id FROM runs"))
        self._keys: dict[tuple[str, str], set[object]] = {}
        self._uids: dict[tuple[str, str], set[str]] = {}

    def has(self, row: Row) -> bool:
        """Whether there is a value, this or a later one, for the key of ``row``."""
        if isinstance(row, SampleRow):
            return row.uid in self._uids_of(row.run_id, row.group_id)
        if isinstance(row, ColumnsRow):
            return {sample.uid for sample in row.samples} <= self._uids_of(row.run_id, row.group_id)
        if isinstance(row, GroupRow):
            return row.group_id in self._keys_of(row.run_id, "SELECT group_id FROM groups WHERE run_id = ?")
        if isinstance(row, BatchRow):
            return row.batch_id in self._keys_of(row.run_id, "SELECT batch_id FROM batches WHERE run_id = ?")
        if isinstance(row, CheckpointRow):
            return row.step in self._keys_of(row.run_id, "SELECT step FROM checkpoints WHERE run_id = ?")
        if isinstance(row, RunRow):
            return row.run_id in self._runs
        return bool(self._keys_of(row.run_id, "SELECT run_id FROM active_times WHERE run_id = ?"))

    def _keys_of(self, run_id: str, query: str) -> set[object]:
        found = self._keys.get((run_id, query))
        if found is None:
            found = self._keys[run_id, query] = set(self._column(query, run_id))
        return found

    def _uids_of(self, run_id: str, group_id: str) -> set[str]:
        found = self._uids.get((run_id, group_id))
        if found is None:
            if len(self._uids) >= REMEMBERED_GROUPS:
                self._uids.clear()
            samples = queries.group_samples(self._connection, run_id, group_id)
            found = self._uids[run_id, group_id] = {sample.row.uid for sample in samples}
        return found

    def _column(self, query: str, *values: object) -> list[object]:
        return [value for (value,) in self._connection.execute(query, values)]
