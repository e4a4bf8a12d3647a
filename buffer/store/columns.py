"""Tables made from row types: the fields of the struct are the only declaration of the columns."""

# ruff: noqa: S608 - names come from our own structs, and values are always bound

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
    """How ``field`` is stored. Instance ids and documents are JSON text, which keeps their type and size."""
    kind = field.type
    if kind == InstanceId or kind == dict[str, Any]:
        return Column(field.name, "TEXT", _to_json, msgspec.json.decode)
    if kind is bool:
        return Column(field.name, "INTEGER", None, bool)
    if kind is int:
        return Column(field.name, "INTEGER")
    if kind in (float, float | None):
        return Column(field.name, "REAL")
    return Column(field.name, "TEXT", None, kind if isinstance(kind, type) and issubclass(kind, StrEnum) else None)


class Table(Generic[RowT]):
    """A table of ``row_type``, one row for each ``key``, with the integer columns ``extra`` behind the fields."""

    def __init__(self, name: str, row_type: type[RowT], key: Sequence[str], extra: Sequence[str] = ()) -> None:
        self.name = name
        self._row_type = row_type
        self._key = tuple(key)
        self._columns = [column_of(field) for field in msgspec.structs.fields(row_type)]
        self._extra = tuple(extra)
        self._names = [column.name for column in self._columns]
        self._to_sql = [(i, column.to_sql) for i, column in enumerate(self._columns) if column.to_sql]
        self._from_sql = [(column.name, column.from_sql) for column in self._columns if column.from_sql]

    @property
    def schema(self) -> str:
        """The statement that makes the table. ``seq`` counts in order of arrival."""
        columns = [f'"{column.name}" {column.sql_type}' for column in self._columns]
        columns += [f"{name} INTEGER" for name in self._extra]
        key = ", ".join(self._key)
        return f"CREATE TABLE {self.name} (seq INTEGER PRIMARY KEY, {', '.join(columns)}, UNIQUE ({key}))"

    def selection(self, alias: str) -> str:
        """The columns for a SELECT from ``alias``, as ``from_values`` takes them."""
        return ", ".join(f'{alias}."{name}"' for name in (*self._names, *self._extra))

    def insert(self, conflict: str, num_rows: int = 1) -> str:
        """``INSERT OR <conflict>`` of ``num_rows`` rows at once."""
        places = f"({', '.join('?' * (len(self._names) + len(self._extra)))})"
        return f"INSERT OR {conflict} {self._into()} VALUES {', '.join([places] * num_rows)}"

    def upsert(self) -> str:
        """The INSERT that gives an existing row new values and leaves it in its place."""
        places = ", ".join("?" * (len(self._names) + len(self._extra)))
        changes = ", ".join(f'"{n}" = excluded."{n}"' for n in (*self._names, *self._extra) if n not in self._key)
        key = ", ".join(self._key)
        return f"INSERT {self._into()} VALUES ({places}) ON CONFLICT ({key}) DO UPDATE SET {changes}"

    def _into(self) -> str:
        return f"INTO {self.name} ({self._quoted()})"

    def _quoted(self) -> str:
        # A field may be called what SQL calls a keyword.
        return ", ".join(f'"{name}"' for name in (*self._names, *self._extra))

    def to_values(self, row: RowT) -> list[Any]:
        """The values of the fields, in the order of the columns, without the extra ones."""
        values = list(msgspec.structs.astuple(row))
        for index, convert in self._to_sql:
            values[index] = convert(values[index])
        return values

    def from_values(self, values: Values) -> RowT:
        """The row whose columns ``values`` begins with."""
        fields = dict(zip(self._names, values, strict=False))
        for name, convert in self._from_sql:
            fields[name] = convert(fields[name])
        return self._row_type(**fields)

    def extra_values(self, values: Values) -> Values:
        """The extra columns in ``values``."""
        return values[len(self._names) : len(self._names) + len(self._extra)]
