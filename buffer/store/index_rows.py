"""The index's tables: rows as columns, samples as text, and many records merged into few changes.

A row type's fields are the only declaration of its table's columns. Samples of one group that arrived together
are one row with one JSON text. A row for each, ordered by uid and by group, costs the writer several times as much.
"""

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from forebay.buffer.store.index_damage import checked, checksum
from forebay.core.group import GroupState
from forebay.core.ids import InstanceId
from forebay.core.records.rows import (
    PART_PREFIX,
    BatchRow,
    CheckpointRow,
    ColumnsRow,
    GroupRow,
    Location,
    Row,
    RunRow,
    SampleRow,
    StartRow,
    StoredSample,
    TickRow,
    from_columns,
)

RowT = TypeVar("RowT", bound=msgspec.Struct)
Values = tuple[Any, ...]
Key = tuple[str | int, ...]
"""Values that identify a row, the run's id first; a new row with the same values replaces the old one."""
Convert = Callable[[Any], Any]


class Column(NamedTuple):
    """One field as an SQLite column; a converter is None if the value is stored unchanged."""

    name: str
    sql_type: str
    to_sql: Convert | None = None
    from_sql: Convert | None = None


def to_json(value: object) -> str:
    """Encode an instance id, a list or a document for its column."""
    return msgspec.json.encode(value).decode()


def _to_real(value: float | None) -> float | None:
    """Return ``value`` as SQLite will: without NaN and without negative zero."""
    return None if value is None or value != value else value + 0.0


def column_of(field: msgspec.structs.FieldInfo) -> Column:
    """Choose a field's column type. Instance ids, lists and documents are JSON text, which keeps type and size."""
    kind = field.type
    if kind in (InstanceId, dict[str, Any], list[str]):
        return Column(field.name, "TEXT", to_json, msgspec.json.decode)
    if kind is bool:
        return Column(field.name, "INTEGER", int, bool)
    if kind in (int, int | None):
        return Column(field.name, "INTEGER")
    if kind in (float, float | None):
        return Column(field.name, "REAL", _to_real)
    return Column(field.name, "TEXT", None, kind if isinstance(kind, type) and issubclass(kind, StrEnum) else None)


class Table(Generic[RowT]):
    """A table of ``row_type``, one row for each ``key``.

    ``written_in`` is the segment with the row's record; ``checksum`` covers all columns before it except ``seq``.
    """

    def __init__(self, name: str, row_type: type[RowT], key: Sequence[str], fixed: Sequence[str] = ()) -> None:
        """``fixed`` lists fields outside the key that never change."""
        self.name = name
        self.row_type = row_type
        self._fixed = tuple(fixed)
        self._key = tuple(key)
        self._columns = [column_of(field) for field in msgspec.structs.fields(row_type)]
        self._names = [column.name for column in self._columns]
        self._stored = [*self._names, "written_in", "checksum"]
        self._to_sql = [(i, column.to_sql) for i, column in enumerate(self._columns) if column.to_sql]
        self._from_sql = [(column.name, column.from_sql) for column in self._columns if column.from_sql]

    @property
    def schema(self) -> str:
        """The CREATE TABLE statement. ``seq`` counts in order of arrival."""
        columns = ", ".join(f'"{column.name}" {column.sql_type}' for column in self._columns)
        rest = f"written_in INTEGER, checksum INTEGER, UNIQUE ({', '.join(self._key)})"
        return f"CREATE TABLE {self.name} (seq INTEGER PRIMARY KEY, {columns}, {rest})"

    def key_of(self, row: RowT) -> Key:
        """Return the key of ``row``."""
        return tuple([getattr(row, name) for name in self._key])

    def keys(self, connection: sqlite3.Connection, run_id: str) -> set[Key]:
        """Return all keys of a run in the table."""
        query = f"SELECT {', '.join(self._key)} FROM {self.name} WHERE run_id = ?"  # noqa: S608 - names of ours
        return set(connection.execute(query, (run_id,)))

    def insert_missing(self, num_rows: int) -> str:
        """INSERT statement for ``num_rows`` rows that leaves existing rows unchanged."""
        return f"INSERT OR IGNORE {self._into(num_rows)}"

    def upsert(self, num_rows: int) -> str:
        """INSERT statement for ``num_rows`` rows that updates existing rows in place."""
        # Fixed columns are not set, because SQLite would rewrite their index entries each time.
        changed = [name for name in self._stored if name not in (*self._key, *self._fixed)]
        changes = ", ".join(f'"{name}" = excluded."{name}"' for name in changed)
        return f"INSERT {self._into(num_rows)} ON CONFLICT ({', '.join(self._key)}) DO UPDATE SET {changes}"

    def _into(self, num_rows: int) -> str:
        # A field's name may be an SQL keyword.
        names = ", ".join(f'"{name}"' for name in self._stored)
        places = f"({', '.join('?' * len(self._stored))})"
        return f"INTO {self.name} ({names}) VALUES {', '.join([places] * num_rows)}"

    def to_values(self, row_and_segment: tuple[RowT, int]) -> list[Any]:
        """Return the row's values in column order, then its segment and the checksum."""
        row, segment = row_and_segment
        values = list(msgspec.structs.astuple(row))
        for index, convert in self._to_sql:
            values[index] = convert(values[index])
        values.append(segment)
        values.append(checksum(values))
        return values

    def find(self, connection: sqlite3.Connection, where: str, *values: object) -> Iterator[RowT]:
        """Find rows by ``where``, the rest of a SELECT, with its ``values``. Raises ``IndexDamaged``."""
        return map(self._from_values, self.checked(connection, where, *values))

    def checked(self, connection: sqlite3.Connection, where: str = "", *values: object) -> Iterator[Values]:
        """Find rows like ``find``, but as tuples of values; all rows without ``where``."""
        columns = ", ".join(f'"{name}"' for name in self._stored)
        query = f"SELECT {columns} FROM {self.name} {where}"  # noqa: S608 - names of ours
        return checked(connection.execute(query, values), len(self._names) + 1)

    def _from_values(self, values: Values) -> RowT:
        # Not strict: the segment and the checksum follow the fields.
        fields = dict(zip(self._names, values, strict=False))
        for name, convert in self._from_sql:
            fields[name] = convert(fields[name])
        return self.row_type(**fields)


RUNS = Table("runs", RunRow, key=("run_id",))
STARTS = Table("starts", StartRow, key=("run_id",))
GROUPS = Table("groups", GroupRow, key=("run_id", "group_id"), fixed=("instance_id", "epoch"))
BATCHES = Table("batches", BatchRow, key=("run_id", "batch_id"))
CHECKPOINTS = Table("checkpoints", CheckpointRow, key=("run_id", "step"))
TABLES: Mapping[type[Row], Table[Any]] = {
    table.row_type: table for table in (RUNS, STARTS, GROUPS, BATCHES, CHECKPOINTS)
}
"""Tables with one row per key, by row type. Samples and ticks are stored differently."""


FIELDS = SampleRow.__struct_fields__
"""The first values of each sample's list in the text; segment, offset and length of its body follow."""

SCHEMA = (
    # ``segment`` holds the bodies, ``written_in`` the record about them; they differ for a ``ColumnsRow``.
    "CREATE TABLE samples (seq INTEGER PRIMARY KEY, run_id TEXT, group_id TEXT, segment INTEGER, written_in INTEGER,"
    f" num_bytes INTEGER, part_bytes INTEGER, newest_at_s REAL, rows TEXT /* {', '.join(FIELDS)} */, checksum INTEGER)",
    "CREATE INDEX samples_by_group ON samples (run_id, group_id)",
    # Ordered by arrival, so that the index grows at its end, which costs almost nothing.
    "CREATE INDEX samples_by_segment ON samples (segment)",
    "CREATE INDEX columns_by_segment ON samples (written_in) WHERE written_in <> segment",
)

DELETE = "DELETE FROM samples INDEXED BY samples_by_group WHERE run_id = ? AND group_id = ? AND segment = ?"
"""Parameters: a run, a group and a segment."""

_COLUMNS = ("run_id", "group_id", "segment", "written_in", "num_bytes", "part_bytes", "newest_at_s", "rows", "checksum")
SELECTION = ", ".join(f"s.{name}" for name in _COLUMNS)
"""Columns for a SELECT from ``samples s``, as expected by ``unpack`` and ``uids``."""
EVERYTHING = f"SELECT {SELECTION} FROM samples s"  # noqa: S608 - names of ours

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


def insert(num_rows: int) -> str:
    """INSERT statement for ``num_rows`` rows made by ``to_values``."""
    places = f"({', '.join('?' * len(_COLUMNS))})"
    return f"INSERT INTO samples ({', '.join(_COLUMNS)}) VALUES {', '.join([places] * num_rows)}"  # noqa: S608


def to_values(key: tuple[str, str, int], samples: Sequence[tuple[SampleRow, Location]]) -> list[object]:
    """Make the values of a row for new ``samples`` with the key run, group and segment."""
    num_bytes = sum(location.length for _, location in samples)
    part_bytes = sum(location.length for row, location in samples if not row.is_sample)
    newest_at_s = max(row.received_at_s for row, _ in samples)
    values = [(*msgspec.structs.astuple(row), *msgspec.structs.astuple(location)) for row, location in samples]
    return _with_checksum([*key, key[2], num_bytes, part_bytes, newest_at_s + 0.0, _encode(values).decode()])


def _with_checksum(values: list[object]) -> list[object]:
    return [*values, checksum(values)]


def columns_to_values(row: ColumnsRow, segment: int) -> list[object]:
    """Make the values of a row for samples whose columns were rewritten in ``segment``."""
    samples = [(sample.row, sample.location) for sample in from_columns(row)]
    values = to_values((row.run_id, row.group_id, row.segment), samples)
    values[3] = segment
    return _with_checksum(values[:-1])


def checked_samples(found: Iterable[Values]) -> Iterator[Values]:
    """Verify the rows of a query for ``SELECTION``. Raises ``IndexDamaged``."""
    return checked(found, len(_COLUMNS) - 1)


def _decoded(found: Iterable[Values]) -> Iterator[list[Any]]:
    for values in checked_samples(found):
        yield from _decode(values[-2])


def unpack(found: Iterable[Values]) -> list[StoredSample]:
    """Decode the samples of a query for ``SELECTION``, in order of arrival; only the last row of each uid in a
    group, since groups may have the same part.

    Raises ``IndexDamaged``.
    """
    samples: dict[tuple[str, str], StoredSample] = {}
    for values in _decoded(found):
        # Not strict: the body's location follows the fields.
        row = SampleRow(**dict(zip(FIELDS, values, strict=False)))
        # A moved body has two rows; the later one has its new location.
        samples[row.group_id, row.uid] = StoredSample(row, Location(*values[len(FIELDS) :]))
    return sorted(samples.values(), key=_arrival)


def _arrival(sample: StoredSample) -> tuple[float, int, int]:
    # Sorted by time first, because a moved body lies behind those of later samples.
    return (sample.row.at_s, sample.location.segment, sample.location.offset)


def uids(found: Iterable[Values]) -> set[str]:
    """Decode the uids of a query for ``SELECTION``, without those of parts and notes. Raises ``IndexDamaged``."""
    place = FIELDS.index("uid")
    return {values[place] for values in _decoded(found) if not values[place].startswith(PART_PREFIX)}


def implied_group(row: SampleRow) -> GroupRow:
    """The group that a member opens if the group has no row of its own yet."""
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
    """A change to a run's active seconds: set to ``seconds``, or raised to at least ``seconds``."""

    seconds: float
    is_set: bool


class IndexUpdate:
    """The merged changes of several records, each key once, in the order in which keys appeared.

    Each row is stored with the segment in which it was found.
    """

    def __init__(self) -> None:
        self.rows: dict[type[Row], dict[Key, tuple[Any, int]]] = {row_type: {} for row_type in TABLES}
        """The latest rows of ``TABLES``, by type and key."""
        self.opened: dict[Key, tuple[GroupRow, int]] = {}
        """Groups as first seen, including those without a row of their own."""
        self.active: dict[str, ActiveTime] = {}
        self.samples: dict[tuple[str, str, int], list[tuple[SampleRow, Location]]] = {}
        """Samples by run, group and segment."""
        self.columns: dict[tuple[str, str, int], tuple[ColumnsRow, int]] = {}

    def add(self, rows: Iterable[Row], location: Location | None, segment: int) -> None:
        """Merge one record of ``segment``."""
        for row in rows:
            if isinstance(row, SampleRow):
                assert location is not None
                self._add_sample(row, location)
            elif isinstance(row, ColumnsRow):
                self._add_columns(row, segment)
            elif isinstance(row, TickRow):
                self.active[row.run_id] = ActiveTime(row.active_s, is_set=True)
            else:
                self.rows[type(row)][TABLES[type(row)].key_of(row)] = row, segment
                if isinstance(row, GroupRow):
                    self.opened.setdefault((row.run_id, row.group_id), (row, segment))
                elif isinstance(row, RunRow):
                    self._raise_active(row.run_id, row.active_s)

    def _add_sample(self, row: SampleRow, location: Location) -> None:
        key = (row.run_id, row.group_id)
        self.samples.setdefault((*key, location.segment), []).append((row, location))
        self._raise_active(row.run_id, row.at_s)
        if row.outcome == "member" and key not in self.opened:
            self.opened[key] = implied_group(row), location.segment

    def _add_columns(self, row: ColumnsRow, segment: int) -> None:
        key = (row.run_id, row.group_id, row.segment)
        self.samples.pop(key, None)  # the rewritten columns include them
        self.columns[key] = row, segment

    def _raise_active(self, run_id: str, seconds: float) -> None:
        known = self.active.get(run_id)
        if known is None:
            self.active[run_id] = ActiveTime(seconds, is_set=False)
        elif seconds > known.seconds:
            self.active[run_id] = ActiveTime(seconds, known.is_set)
