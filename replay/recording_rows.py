"""The rows of a recording's file, each held against its checksum, and as many of them as can be read."""

import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from forebay.core.errors import ForebayError
from forebay.replay.errors import RecordingDamaged
from forebay.replay.model import GroupRecord, RunRecord, SampleRecord
from forebay.replay.recorded_sample import check_group, check_payload
from forebay.replay.recording_schema import META, RecordingTable, checksum, open_recording

RecordT = TypeVar("RecordT", bound=msgspec.Struct)
Values = tuple[Any, ...]
"""What a row has in the columns of its table."""

ROWS_PER_LOOK = 256
MAX_KEYS_IN_VAIN = 1 << 17
"""That are looked for without finding a row, 8 s or so: whoever made the file may have put any key in it."""


class Damage(msgspec.Struct, frozen=True):
    """What of a recording cannot be read."""

    place: str
    """As in ``samples 17``: the table and the row's key."""
    reason: str

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}"

    @classmethod
    def of(cls, error: ForebayError, place: str) -> Self:
        """What an error says, of ``place`` if it does not say of what."""
        if isinstance(error, RecordingDamaged) and error.place:
            return cls(error.place, error.detail)
        return cls(place, str(error))


class RecordingRows:
    """Reads one file; several threads may, one after the other."""

    def __init__(self, path: Path) -> None:
        """Raises ``FileNotFoundError``; ``RecordingDamaged`` for a file of another kind or a newer format."""
        self.path = path
        self._connection = open_recording(path)
        # What is damaged may be no text any more.
        self._connection.text_factory = lambda raw: raw.decode("utf-8", "surrogateescape")
        self._lock = threading.Lock()

    def close(self) -> None:
        """Let go of the file."""
        with self._lock:
            self._connection.close()

    def ask(self, place: str, query: str, *arguments: object) -> list[Values]:
        """What a query finds. Raises ``RecordingDamaged``, which says that it is about ``place``."""
        try:
            return self._ask(query, *arguments)
        except sqlite3.DatabaseError as error:
            raise self.damaged(Damage(place, str(error))) from None

    def find(self, table: RecordingTable, column: str, value: object) -> list[Values]:
        """The rows with ``value`` in ``column``, by their keys. Raises ``RecordingDamaged``."""
        query = f"SELECT {table.selection} FROM {table.name} WHERE {column} = ? ORDER BY {table.key}"  # noqa: S608 - our own names
        return self.ask(f"{table.name} with the {column} {value}", query, value)

    def last(self, table: RecordingTable) -> int:
        """The highest key. Raises ``RecordingDamaged``."""
        return self.ask(table.name, f"SELECT max({table.key}) FROM {table.name}")[0][0] or 0  # noqa: S608 - our own names

    def damaged(self, damage: Damage, *, hint: str = "") -> RecordingDamaged:
        """It as an error."""
        return RecordingDamaged(f"{self.path.name}: {damage}", hint=hint, place=damage.place, detail=damage.reason)

    def read(self, table: RecordingTable, row: Values, kind: type[RecordT]) -> tuple[RecordT, Values]:
        """The record of a row, and its columns. Raises ``RecordingDamaged``."""
        damage = problem(table, row)
        if damage is None:
            try:
                record = msgspec.json.decode(row[len(table.columns) - 1], type=kind)
                _check(table, row, record)
                return record, row
            # All but the first in a file of others.
            except (msgspec.DecodeError, TypeError, ValueError, RecursionError) as error:
                damage = Damage(f"{table.name} {row[0]}", str(error))
        raise self.damaged(damage)

    def scan(self, table: RecordingTable, last: int | None = None) -> Iterator[Values | Damage]:
        """Every row, by its key, and in place of those that cannot be read what is wrong with them.

        ``last`` is the highest key, if it is known: where the table is damaged, rows behind are looked for up to there.
        """
        after, found_at, top = 0, 0, last or 0
        room = self.path.stat().st_size // 16  # bytes of a checksum, which each row has
        query = f"SELECT {table.selection} FROM {table.name} WHERE {table.key} > ? ORDER BY 1 LIMIT {ROWS_PER_LOOK}"  # noqa: S608 - our own names
        while True:
            try:
                rows = self._ask(query, after)
            except sqlite3.DatabaseError as error:
                until = min(after + ROWS_PER_LOOK, top)
                for each in self._one_by_one(table, range(after + 1, until + 1), str(error)):
                    found_at = found_at if isinstance(each, Damage) else until
                    yield each
                if after >= top:
                    return
                after = until
                if after - found_at >= MAX_KEYS_IN_VAIN:
                    vain = f"they are not looked for: none of the {MAX_KEYS_IN_VAIN:,} before them can be read"
                    yield Damage(f"{table.name} {after + 1}-{top}", vain)
                    return
                continue
            if not rows:
                return
            room -= len(rows)
            if room < 0:  # its pages lead in circles
                yield Damage(table.name, "it has more rows than there is room for in the file")
                return
            after += 1
            for row in rows:
                damage = problem(table, row)
                # A damaged key may be any: the next rows are those behind the last good one.
                found_at = after = after if damage else max(after, row[0])
                yield damage or row

    def _one_by_one(self, table: RecordingTable, keys: range, reason: str) -> Iterator[Values | Damage]:
        bad: list[int] = []
        for key in keys:
            try:
                rows = self.find(table, table.key, key)
            except RecordingDamaged:
                bad.append(key)
                continue
            for row in rows:
                yield problem(table, row) or row
        if bad or not keys:
            named = f" {bad[0]}-{bad[-1]}" if len(bad) > 1 else f" {bad[0]}" if bad else ""
            yield Damage(f"{table.name}{named}", reason)

    def _ask(self, query: str, *arguments: object) -> list[Values]:
        with self._lock:
            try:
                return self._connection.execute(query, arguments).fetchall()
            except sqlite3.ProgrammingError:  # closed: a mistake of the caller, no damage
                raise
            except (OverflowError, MemoryError) as error:
                raise sqlite3.DatabaseError(str(error)) from None


def _check(table: RecordingTable, row: Values, record: msgspec.Struct) -> None:
    """Raise ``ValueError`` for a record that no export makes of this row."""
    if isinstance(record, GroupRecord | SampleRecord):
        check_group(record)
    if isinstance(record, RunRecord):
        check_payload(record.payload)
    columns = () if table is META else zip(table.columns[:-1], row, strict=False)
    if any(getattr(record, name, value) != value for name, value in columns):
        raise ValueError("its columns are not what its fields say")


def problem(table: RecordingTable, row: Values) -> Damage | None:
    """What is wrong with a row; its checksum is behind its columns."""
    try:
        is_written = checksum(row[:-1]) == row[-1]
    except (TypeError, ValueError):  # no text, no number of 64 bits
        is_written = False
    return None if is_written else Damage(f"{table.name} {row[0]!r}", "it is not what was written")
