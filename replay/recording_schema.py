"""The file of a recording, ``*.fbr``: one SQLite database, which every tool can open; its tables, and its version."""

import os
import sqlite3
from pathlib import Path

from forebay.replay.errors import RecordingDamaged

APPLICATION_ID = 0x46425231
"""``FBR1``: tells a recording from any other database."""
VERSION = 1
SUFFIX = ".fbr"

TABLES = """
CREATE TABLE meta (name TEXT PRIMARY KEY, json TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE groups (number INTEGER PRIMARY KEY, group_id TEXT NOT NULL UNIQUE, json TEXT NOT NULL);
CREATE TABLE samples (
  seq INTEGER PRIMARY KEY, group_id TEXT NOT NULL, slot INTEGER NOT NULL, fork INTEGER NOT NULL,
  uid TEXT NOT NULL UNIQUE, json TEXT NOT NULL, body BLOB NOT NULL, num_bytes INTEGER NOT NULL);
CREATE INDEX samples_of ON samples (group_id, seq);
CREATE TABLE batches (
  number INTEGER PRIMARY KEY, step INTEGER, checkpoint_step INTEGER, json TEXT NOT NULL);
CREATE TABLE calls (
  seq INTEGER PRIMARY KEY, lane TEXT NOT NULL, digest BLOB NOT NULL, nth INTEGER NOT NULL, method TEXT NOT NULL,
  path TEXT NOT NULL, request BLOB NOT NULL, status INTEGER NOT NULL, headers TEXT NOT NULL, parts BLOB NOT NULL,
  began_s REAL NOT NULL, UNIQUE (lane, digest, nth));
"""
"""``json`` columns are UTF-8 JSON; ``body``, ``request`` and ``parts`` are zstandard frames with a checksum."""


def create(path: Path) -> sqlite3.Connection:
    """A new, empty recording that only its owner may read. Raises ``FileExistsError``, ``OSError``."""
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    connection.executescript(f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {VERSION}; {TABLES}")
    return connection


def open_recording(path: Path) -> sqlite3.Connection:
    """A recording that is there, to be read only. Raises ``RecordingDamaged``, ``FileNotFoundError``."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no recording {str(path)!r}")
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, check_same_thread=False)
    try:
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
    except sqlite3.DatabaseError as error:
        connection.close()
        raise RecordingDamaged(f"{path.name} is no recording: {error}") from None
    if application != APPLICATION_ID or version > VERSION:
        connection.close()
        if application != APPLICATION_ID:
            raise RecordingDamaged(f"{path.name} is a database, but no recording")
        hint = "read it with the version of Forebay that wrote it, or with a later one"
        raise RecordingDamaged(f"{path.name} has format {version}, and this Forebay knows {VERSION}", hint=hint)
    return connection
