"""Damage of the index: how it is detected, and what happens to the file. The log has all of its contents."""

import logging
import os
import shutil
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
from xxhash import xxh3_64_intdigest

FILES = ("", "-wal", "-shm", "-journal")
"""Suffixes of SQLite's files for one database. A WAL left next to a new file would be replayed into it."""

_OTHER_CAUSES = frozenset(
    {
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_INTERRUPT,
        sqlite3.SQLITE_NOLFS,
    }
)
_RIGHTS = frozenset({sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH})
_READ_ERRORS = frozenset({sqlite3.SQLITE_IOERR_READ, sqlite3.SQLITE_IOERR_SHORT_READ, sqlite3.SQLITE_IOERR_CORRUPTFS})

logger = logging.getLogger(__name__)


class IndexDamaged(sqlite3.DatabaseError):
    """The index contradicts itself."""


@contextmanager
def words_of_damage() -> Iterator[None]:
    """Raise ``IndexDamaged`` where SQLite names a damaged object whose name is not valid text."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise IndexDamaged(f"SQLite's message about it is not valid text: {error}") from error


def is_damage(error: BaseException, path: Path) -> bool:
    """Whether ``error`` means that the index at ``path`` is damaged.

    All errors of SQLite do, except those that may be temporary or that a new file would not fix: a full disk,
    a lock, missing permissions.
    """
    if not isinstance(error, sqlite3.DatabaseError) or isinstance(error, sqlite3.ProgrammingError):
        return False
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)  # no code: a TEXT column is not valid text
    kind = code & 0xFF
    if kind in _OTHER_CAUSES:
        return False
    if kind == sqlite3.SQLITE_IOERR:  # write errors are the disk's
        return code in _READ_ERRORS
    if kind == sqlite3.SQLITE_CANTOPEN:  # the cause may also be too many open files
        return _may_write(path.parent) and not all(_is_file_or_missing(each) for each in _files(path))
    if kind in _RIGHTS:
        return _may_write(path.parent) and _may_write(path)
    return True


def is_no_room(error: BaseException) -> bool:
    """Whether ``error`` means that SQLite found the disk full."""
    code = getattr(error, "sqlite_errorcode", 0)
    return code & 0xFF == sqlite3.SQLITE_FULL or code in (sqlite3.SQLITE_IOERR_SHMSIZE, sqlite3.SQLITE_IOERR_WRITE)


def check_is_file(path: Path) -> None:
    """Raise ``IndexDamaged`` if ``path`` is not a file."""
    if path.exists() and not path.is_file():
        raise IndexDamaged("it is not a file")


def _files(path: Path) -> list[Path]:
    return [Path(f"{path}{suffix}") for suffix in FILES]


def _is_file_or_missing(path: Path) -> bool:
    return path.is_file() or not path.exists()


def _may_write(path: Path) -> bool:
    return os.access(path, os.R_OK | os.W_OK)


# --- the file of a damaged index


def delete(path: Path) -> None:
    """Delete the index."""
    for file in _files(path):
        _remove(file)


def set_aside(path: Path) -> None:
    """Rename the index, so that a human can examine it; replaces an earlier one."""
    delete_set_aside(path)
    name = f"{path.name}.damaged-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
    for file, suffix in zip(_files(path), FILES, strict=True):
        try:
            file.rename(path.with_name(name + suffix))
        except FileNotFoundError:
            continue
        except OSError as error:  # nothing depends on the copy
            logger.warning("%s cannot be kept: %s", file, error)
            _remove(file)
    logger.warning("the damaged index is kept as %s; it may be deleted", path.with_name(name))


def delete_set_aside(path: Path) -> None:
    """Delete the index that ``set_aside`` kept."""
    for old in path.parent.glob(f"{path.name}.damaged-*"):
        _remove(old)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
        return
    with suppress(FileNotFoundError):
        path.unlink()


# --- rows: a flipped bit may leave a valid value, which SQLite cannot detect

_pack = msgspec.msgpack.Encoder().encode


def checksum(values: Sequence[Any]) -> int:
    """XXH3 of a row's values as SQLite returns them: 63 bits, which fit into a column."""
    return xxh3_64_intdigest(_pack(values)) >> 1


def checked(rows: Iterable[tuple[Any, ...]], num_values: int) -> Iterator[tuple[Any, ...]]:
    """Yield ``rows`` whose first ``num_values`` values match the checksum after them. Raises ``IndexDamaged``."""
    for values in rows:
        if checksum(values[:num_values]) != values[num_values]:
            raise IndexDamaged("a row has a wrong checksum")
        yield values
