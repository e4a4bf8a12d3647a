"""The dumps of one experiment: a folder for each step, written atomically.

``{step}/gen_batch.json`` is the value, ``gen_batch.safetensors`` its arrays, if any; ``meta.json`` has the length of
each file. A folder is created under a temporary name and renamed once it is on disk. If a folder that is not a valid
dump is in the way, it is renamed, never removed.
"""

import logging
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from forebay.core.errors import InvalidInput, MissingExtra
from forebay.core.files import FILE_MODE, make_folder_durably, sync_directory, write_durably
from forebay.replay.skip.values import Packed, import_extra, pack, unpack

logger = logging.getLogger(__name__)

TREE_FILE = "gen_batch.json"
ARRAYS_FILE = "gen_batch.safetensors"
META_FILE = "meta.json"
VERL_FILE = "gen_batch.dp"

_REMEDY = "remove the folder to dump this step again"
_WRITER = secrets.token_hex(4)
"""Part of the names of this process's unfinished folders."""


class DumpMeta(msgspec.Struct, omit_defaults=True):
    """The content of ``meta.json``. A dump written by verl has no ``num_bytes``."""

    global_steps: int
    num_bytes: dict[str, int]
    """The length of every other file."""
    arguments: dict[str, str] = {}
    """Digests of the function's arguments by name, for arguments that can be digested."""
    created_at_s: float = 0.0
    notes: list[str] = []
    """How the value differs from the function's result: keys left out, types replaced."""


class Dump(NamedTuple):
    """A loaded dump."""

    value: Any
    meta: DumpMeta


class DumpUnusable(Exception):
    """The folder of a step is not a loadable dump."""


class DumpFolder:
    """The folder with the dumps of all steps of an experiment."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def steps(self) -> list[int]:
        """The steps that have a folder, whatever it contains."""
        try:
            names = os.listdir(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [int(name) for name in names if name.isascii() and name.isdecimal() and str(int(name)) == name]

    def meta(self, step: int) -> DumpMeta | None:
        """The metadata of the dump of ``step``; None if there is none.

        Raises ``DumpUnusable``, also if the folder is not a dump.
        """
        folder = self.path / str(step)
        # Checked before looking for the file: another process may rename a whole dump into place at any moment.
        is_free = not os.path.lexists(folder) or (folder.is_dir() and not any(folder.iterdir()))
        if _size(folder / VERL_FILE) is not None and _size(folder / TREE_FILE) is None:
            return DumpMeta(step, {})
        if _size(folder / META_FILE) is None:
            if is_free:
                return None
            raise DumpUnusable(f"it has no {META_FILE}, so it is not a dump of Forebay")
        meta = _read_meta(folder / META_FILE)
        if meta.global_steps != step:
            raise DumpUnusable(f"it belongs to step {meta.global_steps}")
        for name, num_bytes in meta.num_bytes.items():
            found = _size(folder / name)
            if found != num_bytes:
                raise DumpUnusable(f"{name} must have {num_bytes} bytes (found {found})")
        return meta

    def load(self, step: int) -> Dump | None:
        """The dump of ``step``; None if there is none.

        Raises ``DumpUnusable``; ``MissingExtra`` if a package is missing; ``InvalidInput`` if a codec is missing.
        """
        meta = self.meta(step)
        if meta is None:
            return None
        folder = self.path / str(step)
        if not meta.num_bytes:
            return Dump(_read_of_verl(folder / VERL_FILE), meta)
        try:
            arrays = {}
            if ARRAYS_FILE in meta.num_bytes:
                # Not memory-mapped, which would keep a second copy in memory.
                arrays = import_extra("safetensors.numpy").load_file(folder / ARRAYS_FILE, backend="pread")
            return Dump(unpack((folder / TREE_FILE).read_bytes(), arrays), meta)
        except (InvalidInput, MissingExtra, OSError):
            raise
        except Exception as error:  # from a user's codec, or damaged files
            raise DumpUnusable(f"it cannot be decoded: {error!r}; {_REMEDY}") from error

    def write(self, step: int, value: object, arguments: Mapping[str, str]) -> list[str]:
        """Write the dump of ``step`` and return its notes. The caller holds its lock. An existing dump is kept.

        Raises ``NotStorable`` and ``OSError``.
        """
        packed = pack(value)
        make_folder_durably(self.path)
        self._remove_partials(step)
        if not self._is_place_free(step):
            return []
        partial = Path(tempfile.mkdtemp(".partial", f".{step}.{_WRITER}.", self.path))
        try:
            _write_files(partial, step, packed, arguments)
            self._take_place(partial, step)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        sync_directory(self.path)
        return packed.notes

    def _take_place(self, partial: Path, step: int) -> None:
        try:
            partial.rename(self.path / str(step))
        except OSError:
            # Without locks (dumps fail, or files cannot be locked) another process may have been faster.
            if self.meta(step) is None:
                raise

    def _remove_partials(self, step: int) -> None:
        """Remove unfinished folders of processes that died while writing; only the holder of the lock writes."""
        for left in self.path.glob(f".{step}.*.partial"):
            if not left.name.startswith(f".{step}.{_WRITER}."):
                shutil.rmtree(left, ignore_errors=True)

    def _is_place_free(self, step: int) -> bool:
        try:
            return self.meta(step) is None
        except DumpUnusable as unusable:
            self._put_aside(step, unusable)
            return True

    def _put_aside(self, step: int, reason: DumpUnusable) -> None:
        """Rename the unusable folder of ``step``, so that its owner can inspect it."""
        names = (f"{step}.damaged-{number}" for number in count(1))
        aside = next(self.path / name for name in names if not os.path.lexists(self.path / name))
        (self.path / str(step)).rename(aside)
        logger.warning("%s cannot be loaded: %s; renamed to %s", self.path / str(step), reason, aside.name)


def _write_files(folder: Path, step: int, packed: Packed, arguments: Mapping[str, str]) -> None:
    write_durably(folder / TREE_FILE, packed.tree)
    num_bytes = {TREE_FILE: len(packed.tree)}
    if packed.arrays:
        path = folder / ARRAYS_FILE
        import_extra("safetensors.numpy").save_file(packed.arrays, path)
        path.chmod(FILE_MODE)
        with path.open("rb") as file:
            os.fsync(file.fileno())
        num_bytes[ARRAYS_FILE] = path.stat().st_size
    meta = DumpMeta(step, num_bytes, dict(arguments), time.time(), packed.notes)
    write_durably(folder / META_FILE, msgspec.json.encode(meta))


def _read_of_verl(path: Path) -> Any:
    """The value of a dump written by verl. Raises ``DumpUnusable``."""
    try:
        from forebay.replay.skip.verl import read_gen_batch

        return read_gen_batch(path)
    except Exception as error:
        raise DumpUnusable(f"{VERL_FILE}: {error}; {_REMEDY}") from error


def _read_meta(path: Path) -> DumpMeta:
    """Read ``meta.json``. Raises ``DumpUnusable``."""
    try:
        meta = msgspec.json.decode(path.read_bytes(), type=DumpMeta)
    except msgspec.MsgspecError as error:
        raise DumpUnusable(f"{META_FILE} is damaged, or from another version of Forebay: {error}") from None
    # Its names become paths, which must stay inside the folder.
    if TREE_FILE not in meta.num_bytes or not set(meta.num_bytes) <= {TREE_FILE, ARRAYS_FILE}:
        raise DumpUnusable(f"{META_FILE} names files that are not part of a dump")
    return meta


def _size(path: Path) -> int | None:
    """Size of a regular file; None for anything else. Opening a pipe of that name would block."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None
