"""The file of a recording, ``*.fbr``: one SQLite database, which every tool can open; its tables, and its version."""

import os
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from forebay.replay.errors import RecordingDamaged

APPLICATION_ID = 0x46425231
"""``FBR1``: tells a recording from any other database."""
VERSION = 2
SUFFIX = ".fbr"
MAX_BODY_BYTES = 1 << 30
"""Of what a frame holds. A file of a few MB may promise any size: it is looked at before there is room for it."""

TABLES = """
CREATE TABLE meta (name TEXT PRIMARY KEY, json TEXT NOT NULL, checksum BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE groups (
  number INTEGER PRIMARY KEY, group_id TEXT NOT NULL UNIQUE, num_rows INTEGER NOT NULL, json TEXT NOT NULL,
  checksum BLOB NOT NULL);
CREATE TABLE samples (
  seq INTEGER PRIMARY KEY, group_id TEXT NOT NULL, slot INTEGER NOT NULL, fork INTEGER NOT NULL, uid TEXT NOT NULL,
  num_bytes INTEGER NOT NULL, json TEXT NOT NULL, checksum BLOB NOT NULL, body BLOB NOT NULL, UNIQUE (group_id, uid));
CREATE TABLE batches (
  number INTEGER PRIMARY KEY, step INTEGER, checkpoint_step INTEGER, json TEXT NOT NULL, checksum BLOB NOT NULL);
CREATE TABLE calls (
  seq INTEGER PRIMARY KEY, lane TEXT NOT NULL, digest BLOB NOT NULL, nth INTEGER NOT NULL, method TEXT NOT NULL,
  path TEXT NOT NULL, request BLOB NOT NULL, status INTEGER NOT NULL, headers TEXT NOT NULL, parts BLOB NOT NULL,
  began_s REAL NOT NULL, UNIQUE (lane, digest, nth));
"""
"""``json`` columns are UTF-8 JSON; ``body``, ``request`` and ``parts`` are zstandard frames with a checksum."""

SCHEMA = "SELECT type, name, tbl_name, sql FROM sqlite_master"
FIRST_STEPS, STEPS_PER_BYTE, STEPS_AT_ONCE = 1_000_000, 4, 10_000
"""Of SQLite's machine. Where it checks all of a file with the shortest rows, it takes half a step for a byte."""

_encode = msgspec.json.Encoder().encode


class RecordingTable(NamedTuple):
    """A table whose rows have a checksum over these columns. The first of them is its key."""

    name: str
    columns: tuple[str, ...]

    @property
    def key(self) -> str:
        """The column by which a row is found."""
        return self.columns[0]

    @property
    def selection(self) -> str:
        """The columns, and the checksum behind them, as SQL."""
        return ", ".join((*self.columns, "checksum"))

    def insertion(self, *more: str) -> str:
        """The statement that adds a row of these columns, its checksum, and ``more``."""
        names = (*self.columns, "checksum", *more)
        return f"INSERT INTO {self.name} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"  # noqa: S608 - our own names


META = RecordingTable("meta", ("name", "json"))
GROUPS = RecordingTable("groups", ("number", "group_id", "num_rows", "json"))
SAMPLES = RecordingTable("samples", ("seq", "group_id", "slot", "fork", "uid", "num_bytes", "json"))
BATCHES = RecordingTable("batches", ("number", "step", "checkpoint_step", "json"))


def checksum(values: Sequence[object]) -> bytes:
    """What a row with these values has: BLAKE2b, 16 bytes, of a JSON list of them, without spaces."""
    return blake2b(_encode(values), digest_size=16).digest()


def create(path: Path) -> sqlite3.Connection:
    """A new, empty recording that only its owner may read; none where that fails.

    Raises ``FileExistsError``, ``OSError``, ``sqlite3.Error``.
    """
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        connection.executescript(f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {VERSION}; {TABLES}")
    except BaseException:
        connection.close()
        for each in (path, path.with_name(f"{path.name}-journal")):
            each.unlink(missing_ok=True)
        raise
    return connection


class BoundedConnection(sqlite3.Connection):
    """Ends a statement after ``most_steps``: pages of a file may lead in circles, in which SQLite would never end."""

    most_steps = steps = 0

    def execute(self, *given: Any) -> sqlite3.Cursor:
        """Execute a statement, within ``most_steps``."""
        self.steps = 0
        self.set_progress_handler(self._is_beyond, STEPS_AT_ONCE)
        return super().execute(*given)

    def _is_beyond(self) -> bool:
        self.steps += STEPS_AT_ONCE
        return self.steps > self.most_steps


WHAT_MAKES_ONE = "forebay recording export RUN FILE makes one, and forebay engine record"


def open_recording(path: Path) -> sqlite3.Connection:
    """A recording that is there, to be read only. Raises ``RecordingDamaged``, ``FileNotFoundError``."""
    try:
        is_there = path.is_file()
    except OSError as error:  # a name that is too long, a folder that is closed to us
        raise FileNotFoundError(f"there is no recording {str(path)!r:.200}: {error.strerror}") from None
    if not is_there:
        raise FileNotFoundError(f"there is no recording {str(path)!r:.200}")
    try:
        address = f"{path.absolute().as_uri()}?mode=ro"
        connection = sqlite3.connect(address, uri=True, check_same_thread=False, factory=BoundedConnection)
        num_bytes = sum(each.stat().st_size for each in (path, path.with_name(f"{path.name}-wal")) if each.is_file())
        connection.most_steps = FIRST_STEPS + num_bytes * STEPS_PER_BYTE
        connection.execute("PRAGMA trusted_schema = OFF")
    except sqlite3.OperationalError as error:  # it may not be read
        raise RecordingDamaged(f"{path.name}: {error}") from None
    try:
        _check_format(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection


def _check_format(connection: sqlite3.Connection, path: Path) -> None:
    if missing := _cut_off(path):
        hint = "copy the file again from where it is whole, or export the run again"
        raise RecordingDamaged(f"{path.name} is cut off: {missing}", hint=hint)
    try:
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
    except sqlite3.DatabaseError as error:
        raise RecordingDamaged(f"{path.name} is no recording: {error}", hint=WHAT_MAKES_ONE) from None
    if application == APPLICATION_ID and version != VERSION:
        hint = "export or record it again, or read it with the version of Forebay that wrote it"
        raise RecordingDamaged(f"{path.name} has format {version}, and this Forebay knows {VERSION}", hint=hint)
    stranger = _stranger(connection) if application == APPLICATION_ID else ""
    if stranger or application != APPLICATION_ID:
        reason = f"it has {stranger}, which no recording has" if stranger else "it is another database, or empty"
        raise RecordingDamaged(f"{path.name} is no recording: {reason}", hint=WHAT_MAKES_ONE)


def _cut_off(path: Path) -> str:
    """How much is there of a database that was cut short; "" for any other file."""
    if path.with_name(f"{path.name}-wal").exists():  # it has pages that this file may lack
        return ""
    with path.open("rb") as file:
        head, num_bytes = file.read(32), os.fstat(file.fileno()).st_size
    # The bytes of a page (1 stands for 65,536, which no recording has), and how many pages there are.
    whole = int.from_bytes(head[16:18]) * int.from_bytes(head[28:32]) if head.startswith(b"SQLite format 3") else 0
    return f"{num_bytes:,} of {whole:,} bytes are there" if num_bytes < whole else ""


def _latin(raw: bytes) -> str:
    return raw.decode("latin-1")


@cache
def _entries() -> frozenset[tuple[object, ...]]:
    """What the schema of a recording may have."""
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(TABLES)
        connection.text_factory = _latin
        return frozenset(connection.execute(SCHEMA))


def _stranger(connection: sqlite3.Connection) -> str:
    """What a schema has besides our tables as we make them: a view may never end, a column be made of anything."""
    connection.text_factory = _latin  # a name may be no text
    try:
        entries: list[tuple[object, ...]] = connection.execute(SCHEMA).fetchall()
    except sqlite3.DatabaseError:
        return ""  # damaged: whoever reads a table will be told
    finally:
        connection.text_factory = str
    strange = next((each for each in entries if each not in _entries()), None)
    if strange is None:
        return ""
    return f"a {strange[0]!s:.20} ({strange[1]!r:.100})"
