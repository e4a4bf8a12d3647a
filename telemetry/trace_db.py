"""Loads all records of a trace into a temporary database, on one clock. Memory use does not grow with the trace.

This is the only reader of traces. Reports, exports and the simulator use it to read a run's events and its rollouts::

    db = TraceDB.read(Path("runs/run-…/trace"), on_bad_line=print)
    for attempts in db.rollouts(["group-1"]):
        print(attempts[0].uid, len(attempts))
"""

import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Self

import msgspec

from forebay.core.errors import ForebayError, InvalidInput
from forebay.telemetry.attempts import Attempt, TraceLine, Writer, attempts_of
from forebay.telemetry.tracing.read_trace import (
    OnBadLine,
    bounded_lines,
    decode_line,
    find_trace,
    trace_files,
    version_text,
)
from forebay.telemetry.tracing.records import VERSION, Head, Open, ProcessChange, Read, Record, RolloutSummary, Span

LOOKED_FOR = "{run,gateway,server}-*.jsonl (there or in its trace/), or step_*/worker_*.jsonl of verl's profile log"
"""The files that make a folder readable."""

TraceSource = Path | Iterable[bytes | str]
"""A folder with a trace, one of its files, or lines such as ``GET /v1/runs/{run_id}/trace`` streams."""

_TABLE = """
CREATE TABLE line (
  uid TEXT, grp TEXT, is_summary INTEGER, writer INTEGER, number INTEGER, begin INTEGER, end INTEGER, raw BLOB
)
"""
_INSERT = "INSERT INTO line VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
_INDEXES = """
CREATE INDEX by_group ON line (grp);
CREATE INDEX summaries ON line (is_summary) WHERE is_summary;
"""
_Row = tuple[str, str, bool, int, int, int, int, bytes]
_OF_ROLLOUT = (Span, Open, RolloutSummary)

_READ_TIMES = ("last_asked", "satisfied", "judged", "first_byte", "sent")

_decode = msgspec.json.Decoder(Record).decode


class GroupSpan(NamedTuple):
    """A group's first begin and last end, from the records of its rollouts. Times in ns."""

    name: str
    begin: int
    end: int


class TraceDB:
    """Created by ``read``; may be used only in the thread that created it."""

    def __init__(self) -> None:
        self.writers: list[Writer] = []
        self._clocks: dict[str, Head] = {}
        """The first head of each boot of a machine: the processes of a boot share a monotonic clock."""
        self._database = sqlite3.connect("", isolation_level=None)  # a private file, deleted with the connection
        self._database.execute("PRAGMA page_size = 65536")  # fewer writes, which saves a tenth of the time
        self._database.execute(_TABLE)

    @classmethod
    def read(cls, *sources: TraceSource, on_bad_line: OnBadLine) -> Self:
        """Read all records of ``sources``, which are parts of one trace. Bad lines go to ``on_bad_line``.

        Raises ``InvalidInput`` for a folder without a trace, ``ForebayError`` if the temporary file cannot be written.
        """
        self = cls()
        try:
            self._database.execute("BEGIN")
            for source in sources:
                for file, lines in _files(source):
                    self._database.executemany(_INSERT, self._rows(file, lines, on_bad_line))
            self._database.executescript(_INDEXES)
            self._name_groups()
        except (sqlite3.OperationalError, OverflowError) as error:
            hint = "set SQLITE_TMPDIR to a folder with as much free space as the trace takes"
            raise ForebayError(f"the temporary database of a trace cannot be written: {error}", hint=hint) from None
        self._find_ends()
        return self

    @property
    def is_empty(self) -> bool:
        """Whether the trace has only heads."""
        return self._database.execute("SELECT 1 FROM line LIMIT 1").fetchone() is None

    @property
    def begin_ns(self) -> int:
        """When the first process began to write; 0 if unknown."""
        return min((writer.head.wall_ns + writer.shift_ns for writer in self.writers if writer.head), default=0)

    @property
    def last_ns(self) -> int:
        """The latest time recorded by any process."""
        return max((writer.last_ns for writer in self.writers), default=0)

    def groups(self) -> Iterator[GroupSpan]:
        """The groups whose rollouts have records, in the order of their first line."""
        query = "SELECT grp, min(begin), max(end) FROM line WHERE uid != '' GROUP BY grp ORDER BY min(rowid)"
        return (GroupSpan(*row) for row in self._database.execute(query))

    def rollouts(self, groups: Iterable[str]) -> Iterator[list[Attempt]]:
        """The attempts of each rollout of ``groups``, in order. Loads one group into memory at a time."""
        query = "SELECT uid, writer, number, raw FROM line WHERE grp = ? AND uid != '' ORDER BY rowid"
        last_ns = self.last_ns
        for group in groups:
            found: dict[str, list[TraceLine]] = {}
            for uid, *row in self._database.execute(query, (group,)):
                found.setdefault(uid, []).append(self._line(*row))
            for uid, lines in found.items():
                yield attempts_of(uid, lines, last_ns)

    def summaries(self) -> Iterator[TraceLine]:
        """The summaries of all attempts, in the order of their lines."""
        query = "SELECT writer, number, raw FROM line WHERE is_summary ORDER BY rowid"
        return (self._line(*row) for row in self._database.execute(query))

    def of_run(self) -> Iterator[TraceLine]:
        """All records outside rollouts, in the order in which they ended."""
        query = "SELECT writer, number, raw FROM line WHERE grp = '' AND uid = '' ORDER BY end, rowid"
        return (self._line(*row) for row in self._database.execute(query))

    def _rows(self, file: str, lines: Iterable[bytes], on_bad_line: OnBadLine) -> Iterator[_Row]:
        writer, number, of_other_version = self._add(Writer(file)), 0, False
        for line in lines:
            number += 1
            record = decode_line(line)
            if isinstance(record, str):
                if not line.isspace() and not of_other_version:
                    on_bad_line(writer.file, number, record)
            elif isinstance(record, Head):
                writer = self._add(Writer(file, record, self._shift_of(record)))
                if number > 1:  # a stream is a sequence of files
                    writer.file, number = writer.name, 1
                of_other_version = record.version > VERSION
                if of_other_version:
                    on_bad_line(writer.file, number, version_text(record))
            elif not of_other_version:
                yield self._row(writer, number, record, line)

    def _shift_of(self, head: Head) -> int:
        """What to add to the times of a process: it anchored the clock itself, and the wall clock may have been set."""
        first = self._clocks.setdefault(head.boot, head) if head.boot else head
        return (first.wall_ns - first.mono_ns) - (head.wall_ns - head.mono_ns)

    def _add(self, writer: Writer) -> Writer:
        self.writers.append(writer)
        return writer

    def _row(self, writer: Writer, number: int, record: Record, line: bytes) -> _Row:
        begin: int = record.t + writer.shift_ns  # type: ignore[union-attr]  # heads are handled by the caller
        uid = group = ""
        if isinstance(record, _OF_ROLLOUT):
            end = begin if isinstance(record, Open) else begin + record.d
            uid, group = record.uid, record.group if record.uid else ""
        elif isinstance(record, Read):
            end = max(record.t, record.satisfied, record.sent) + writer.shift_ns
        else:
            end = begin + getattr(record, "d", 0)
        writer.last_ns = max(writer.last_ns, end)
        is_summary = isinstance(record, RolloutSummary)
        return uid, group, is_summary, len(self.writers) - 1, number, begin, end, line

    def _name_groups(self) -> None:
        """Assign records that name a rollout but no group to the group of that rollout."""
        query = """
            SELECT DISTINCT line.uid, named.grp FROM line
            LEFT JOIN line AS named ON named.is_summary AND named.uid = line.uid AND named.grp != ''
            WHERE line.grp = '' AND line.uid != ''
        """
        for uid, named in self._database.execute(query).fetchall():
            group = named or _group_in(uid)
            known = self._database.execute("SELECT 1 FROM line WHERE grp = ? LIMIT 1", (group,)).fetchone()
            own = group if known and group else uid
            self._database.execute("UPDATE line SET grp = ? WHERE grp = '' AND uid = ?", (own, uid))

    def _find_ends(self) -> None:
        """Set for each writer when the server saw its process end."""
        changes = [line.record for line in self.of_run() if isinstance(line.record, ProcessChange)]
        ends = [(change.process, change.t) for change in changes if change.what in ("failed", "ended")]
        for writer in self.writers:
            own = (t for process, t in ends if process and process == writer.process and t >= writer.last_ns)
            writer.ended_ns = next(own, 0)

    def _line(self, writer: int, number: int, raw: bytes) -> TraceLine:
        own, record = self.writers[writer], _decode(raw)
        if own.shift_ns:
            _shift(record, own.shift_ns)
        return TraceLine(own, number, record)


def _files(source: TraceSource) -> Iterator[tuple[str, Iterable[bytes]]]:
    """The name of each file of ``source``, and its lines."""
    if not isinstance(source, Path):
        yield "trace", (line.encode() if isinstance(line, str) else line for line in source)
        return
    folder = find_trace(source)
    if folder is None and not source.is_file():
        what = "no log in" if source.is_dir() else "no folder"
        raise InvalidInput(f"{what} {source}: expected {LOOKED_FOR}", field="source")
    for path in trace_files(folder) if folder else [source]:
        try:
            with path.open("rb") as file:
                yield str(path), (line for _, line in bounded_lines(file))
        except FileNotFoundError:  # removed by the budget
            continue


def _group_in(uid: str) -> str:
    """The group named in ``uid``, if it is a ``rollout_uid``."""
    parts = uid.rsplit("-", 2)
    return parts[1] if len(parts) == 3 else uid


def _shift(record: Record, ns: int) -> None:
    """Shift all times of ``record`` by ``ns``."""
    record.t += ns  # type: ignore[union-attr]  # heads are handled by the caller
    if isinstance(record, Read):
        for name in _READ_TIMES:
            if moment := getattr(record, name):
                setattr(record, name, moment + ns)
    elif isinstance(record, RolloutSummary):
        record.started += ns if record.started else 0
        for turn in record.turns:
            turn.t += ns
