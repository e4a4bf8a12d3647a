"""Tables made from row types: the fields of the struct are the only declaration of the columns."""

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from forebay.core.ids import InstanceId

RowT = TypeVar("RowT", bound=msgspec.Struct)
Values = tuple[Any, ...]
Convert = Callable[[Any], Any]


class Column(NamedTuple):
    """One field as SQLite has it; the converters are None where the value is stored as it is."""

    name: str
    sql_type: str
    to_sql: Convert | None = None
    from_sql: Convert | None = None


def _to_json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def column_of(field: msgspec.structs.FieldInfo) -> Column:
    """How ``field`` is stored. Instance ids, lists and documents are JSON text, which keeps their type and size."""
    kind = field.type
    if kind in (InstanceId, dict[str, Any], list[str]):
        return Column(field.name, "TEXT", _to_json, msgspec.json.decode)
    if kind is bool:
        return Column(field.name, "INTEGER", None, bool)
    if kind in (int, int | None):
        return Column(field.name, "INTEGER")
    if kind in (float, float | None):
        return Column(field.name, "REAL")
    return Column(field.name, "TEXT", None, kind if isinstance(kind, type) and issubclass(kind, StrEnum) else None)


class Table(Generic[RowT]):
    """A table of ``row_type``, one row for each ``key``; ``written_in`` is the segment that holds the row's record."""

    def __init__(self, name: str, row_type: type[RowT], key: Sequence[str]) -> None:
        self.name = name
        self._row_type = row_type
        self._key = tuple(key)
        self._columns = [column_of(field) for field in msgspec.structs.fields(row_type)]
        self._names = [column.name for column in self._columns]
        self._to_sql = [(i, column.to_sql) for i, column in enumerate(self._columns) if column.to_sql]
        self._from_sql = [(column.name, column.from_sql) for column in self._columns if column.from_sql]

    @property
    def schema(self) -> str:
        """The statement that makes the table. ``seq`` counts in order of arrival."""
        columns = ", ".join(f'"{column.name}" {column.sql_type}' for column in self._columns)
        unique = f"UNIQUE ({', '.join(self._key)})"
        return f"CREATE TABLE {self.name} (seq INTEGER PRIMARY KEY, {columns}, written_in INTEGER, {unique})"

    def selection(self, alias: str) -> str:
        """The columns for a SELECT from ``alias``, as ``from_values`` takes them."""
        return ", ".join(f'{alias}."{name}"' for name in self._names)

    def insert_missing(self, num_rows: int) -> str:
        """The INSERT of ``num_rows`` rows that leaves those alone that are there."""
        return f"INSERT OR IGNORE {self._into(num_rows)}"

    def upsert(self, num_rows: int) -> str:
        """The INSERT of ``num_rows`` rows that gives existing ones new values and leaves them in their places."""
        changed = [*(name for name in self._names if name not in self._key), "written_in"]
        changes = ", ".join(f'"{name}" = excluded."{name}"' for name in changed)
        return f"INSERT {self._into(num_rows)} ON CONFLICT ({', '.join(self._key)}) DO UPDATE SET {changes}"

    def _into(self, num_rows: int) -> str:
        # A field may be called what SQL calls a keyword.
        names = ", ".join(f'"{name}"' for name in (*self._names, "written_in"))
        places = f"({', '.join('?' * (len(self._names) + 1))})"
        return f"INTO {self.name} ({names}) VALUES {', '.join([places] * num_rows)}"

    def to_values(self, row_and_segment: tuple[RowT, int]) -> list[Any]:
        """The values of the fields, in the order of the columns, and the segment in which the row was found."""
        row, segment = row_and_segment
        values = list(msgspec.structs.astuple(row))
        for index, convert in self._to_sql:
            values[index] = convert(values[index])
        values.append(segment)
        return values

    def from_values(self, values: Values) -> RowT:
        """The row whose columns ``values`` begins with."""
        fields = dict(zip(self._names, values, strict=False))
        for name, convert in self._from_sql:
            fields[name] = convert(fields[name])
        return self._row_type(**fields)
