"""The dumps of one experiment: a folder for each step, which is there wholly or not at all.

``{step}/gen_batch.json`` is the value, ``gen_batch.safetensors`` its tensors where it has some; ``meta.json``, which is
written last, has the length and the digest of each of them and ends with its own. A folder is made beside its place and
renamed. What is found in that place and is no such dump is renamed aside, never removed, and nothing in it is opened
but these three names.
"""

import hashlib
import logging
import os
import secrets
import shutil
import stat
import time
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from forebay.core.errors import InvalidInput, MissingExtra
from forebay.core.files import FOLDER_MODE, make_folder_durably, sync_directory, write_durably
from forebay.core.safetensors_format import file_head, read_tensors
from forebay.replay.skip.values import Packed, pack, unpack

logger = logging.getLogger(__name__)

FORMAT = 1
TREE_FILE = "gen_batch.json"
TENSORS_FILE = "gen_batch.safetensors"
META_FILE = "meta.json"
VERL_FILE = "gen_batch.dp"
MAX_META_BYTES = 1 << 20

_SEAL = b',"blake2b":"%b"}'
_SEAL_BYTES = len(_SEAL % (b"0" * 64))


class FileProof(msgspec.Struct):
    """What a file has to be."""

    blake2b: str
    num_bytes: int


class DumpMeta(msgspec.Struct, omit_defaults=True):
    """What ``meta.json`` says, but for its own digest at its end. A dump that verl wrote has no ``files``."""

    global_steps: int
    format: int
    files: dict[str, FileProof]
    arguments: dict[str, str]
    """The digests of the arguments with which the function was called, by their names, of those that have one."""
    created_at_s: float
    notes: list[str] = []
    """How the value differs from the one that the function returned: keys left out, types replaced."""


class Dump(NamedTuple):
    """A dump that was loaded."""

    value: Any
    meta: DumpMeta


class DumpUnusable(Exception):
    """What lies in the place of a dump is none that can be loaded; it is renamed unless it ``stays``."""

    def __init__(self, reason: str, *, stays: bool = False) -> None:
        super().__init__(reason)
        self.stays = stays


class DumpFolder:
    """The folder with the dumps of all steps of one experiment."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def lock_path(self, step: int) -> Path:
        """Locked by whoever makes the dump of ``step``, or puts it aside."""
        return self.path / f".{step}.lock"

    def steps(self) -> list[int]:
        """The steps that have a folder, whatever is in it."""
        try:
            names = os.listdir(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [int(name) for name in names if name.isascii() and name.isdecimal() and str(int(name)) == name]

    def meta(self, step: int) -> DumpMeta | None:
        """What the dump of ``step`` says of itself; None where there is nothing. Files are looked at, not read.

        Raises ``DumpUnusable``, also where there is something else.
        """
        folder = self.path / str(step)
        # Before the file is looked for: a whole dump may take the place at any moment.
        is_free = not os.path.lexists(folder) or (folder.is_dir() and not any(folder.iterdir()))
        raw = _read_file(folder / META_FILE, MAX_META_BYTES)
        if _size(folder / VERL_FILE) is not None and _size(folder / TREE_FILE) is None:
            return DumpMeta(step, FORMAT, {}, {}, 0.0)
        if raw is None:
            if is_free:
                return None
            raise DumpUnusable(f"it has no {META_FILE}: no dump of Forebay")
        meta = _read_meta(bytes(raw))
        if meta.global_steps != step:
            raise DumpUnusable(f"it is of step {meta.global_steps}")
        for name, proof in meta.files.items():
            found = _size(folder / name)
            if found != proof.num_bytes:
                raise DumpUnusable(f"{name} has {found} bytes of {proof.num_bytes}")
        return meta

    def load(self, step: int) -> Dump | None:
        """The dump of ``step``; None where there is nothing.

        Raises ``DumpUnusable``; ``MissingExtra`` without the package of its arrays; ``InvalidInput`` without the codec.
        """
        files = self._verified(step)
        if files is None:
            return None
        meta, content = files
        if not meta.files:
            return Dump(_read_of_verl(self.path / str(step) / VERL_FILE), meta)
        try:
            tensors = read_tensors(content[TENSORS_FILE]) if TENSORS_FILE in content else {}
        except InvalidInput as error:
            raise DumpUnusable(str(error)) from None
        try:
            return Dump(unpack(content[TREE_FILE], tensors), meta)
        except (InvalidInput, MissingExtra):
            raise
        except Exception as error:  # of a user's codec, or of files that somebody else has sealed
            raise DumpUnusable(f"no value can be made of it: {error!r}") from error

    def _verified(self, step: int) -> tuple[DumpMeta, dict[str, bytearray]] | None:
        """Its files, which are what they have to be. Raises ``DumpUnusable``."""
        meta = self.meta(step)
        if meta is None:
            return None
        content = {}
        for name, proof in meta.files.items():
            found = _read_file(self.path / str(step) / name, proof.num_bytes)
            if found is None or _digest(found) != proof.blake2b:
                raise DumpUnusable(f"{name} is damaged: its digest differs")
            content[name] = found
        return meta, content

    def write(self, step: int, value: object, arguments: Mapping[str, str]) -> list[str]:
        """Make the dump of ``step``, and return its notes; the caller holds its lock. One that is whole stays as it is.

        Raises ``NotStorable``, ``DumpUnusable`` where there is one of a newer format, and ``OSError``.
        """
        packed = pack(value)
        make_folder_durably(self.path)
        self._remove_partials(step)
        if not self._is_place_free(step):
            return []
        partial = self.path / f".{step}.{_own_name()}.{secrets.token_hex(4)}.partial"
        partial.mkdir(FOLDER_MODE)
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
            # Where nobody locks, since dumps fail or files cannot be locked, another one may have come first.
            if self.meta(step) is None:
                raise

    def _remove_partials(self, step: int) -> None:
        """Of those who were killed while they wrote: of other processes, whoever holds the lock is the only one."""
        for left in self.path.glob(f".{step}.*.partial"):
            if not left.name.startswith(f".{step}.{_own_name()}."):
                shutil.rmtree(left, ignore_errors=True)

    def _is_place_free(self, step: int) -> bool:
        try:
            return self._verified(step) is None
        except DumpUnusable as unusable:
            if unusable.stays:
                raise
            self.put_aside(step, str(unusable))
            return True

    def put_aside(self, step: int, reason: str) -> None:
        """Rename what lies in the place of ``step``, for its owner to look at; the caller holds the lock."""
        for number in count(1):
            aside = self.path / f"{step}.damaged-{number}"
            if not os.path.lexists(aside):
                (self.path / str(step)).rename(aside)
                break
        logger.warning("%s cannot be loaded: %s; put aside as %s", self.path / str(step), reason, aside.name)
        sync_directory(self.path)

    def put_aside_if_unusable(self, step: int) -> None:
        """The same where it still is no dump; the caller holds the lock."""
        try:
            self._verified(step)
        except DumpUnusable as unusable:
            if not unusable.stays:
                self.put_aside(step, str(unusable))


_TOKEN = secrets.token_hex(4)


def _own_name() -> str:
    """This process's, and no later one's: in a container, each trainer may have the same number."""
    return f"{os.getpid()}-{_TOKEN}"


def _write_files(folder: Path, step: int, packed: Packed, arguments: Mapping[str, str]) -> None:
    pieces: dict[str, list[bytes | memoryview]] = {TREE_FILE: [packed.tree]}
    if packed.tensors:
        head = file_head([(name, each.dtype, each.shape) for name, each in packed.tensors.items()], {})
        pieces[TENSORS_FILE] = [head, *(each.data for each in packed.tensors.values())]
    files = {}
    for name, of_file in pieces.items():
        write_durably(folder / name, *of_file)
        files[name] = FileProof(_digest(*of_file), sum(map(len, of_file)))
    meta = msgspec.json.encode(DumpMeta(step, FORMAT, files, dict(arguments), time.time(), packed.notes))
    write_durably(folder / META_FILE, _sealed(meta))


def _read_of_verl(path: Path) -> Any:
    """The value of a dump that verl wrote. Raises ``DumpUnusable``."""
    try:
        from forebay.replay.skip.verl import read_gen_batch

        return read_gen_batch(path)
    except Exception as error:
        raise DumpUnusable(f"{VERL_FILE}: {error}; remove the folder to dump this step again", stays=True) from error


def _digest(*pieces: bytes | bytearray | memoryview) -> str:
    found = hashlib.blake2b(digest_size=32)
    for piece in pieces:
        found.update(piece)
    return found.hexdigest()


def _sealed(meta: bytes) -> bytes:
    """The JSON object with the digest of all before it as its last field."""
    return meta[:-1] + _SEAL % _digest(meta[:-1]).encode()


def _read_meta(raw: bytes) -> DumpMeta:
    """Raises ``DumpUnusable``."""
    body = raw[:-_SEAL_BYTES]
    if _sealed(body + b"}") != raw:
        raise DumpUnusable(f"{META_FILE} is damaged, or not of Forebay")
    try:
        version = msgspec.json.decode(raw, type=dict[str, Any]).get("format")
        if isinstance(version, int) and version > FORMAT:
            raise DumpUnusable(f"it is of format {version}, and this Forebay knows {FORMAT}", stays=True)
        meta = msgspec.json.decode(raw, type=DumpMeta)
    except msgspec.MsgspecError as error:
        raise DumpUnusable(f"{META_FILE}: {error}") from None
    # Its names become paths: none may lead out of the folder.
    if TREE_FILE not in meta.files or not set(meta.files) <= {TREE_FILE, TENSORS_FILE}:
        raise DumpUnusable(f"{META_FILE} names other files than those of a dump")
    return meta


def _open(path: Path) -> int | None:
    """A descriptor of a regular file; None where there is none. A pipe of that name must not be waited for."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    return None


def _size(path: Path) -> int | None:
    fd = _open(path)
    if fd is None:
        return None
    try:
        return os.fstat(fd).st_size
    finally:
        os.close(fd)


def _read_file(path: Path, max_bytes: int) -> bytearray | None:
    """Its first ``max_bytes``, in one piece of memory that what is made of it shares; None where there is none."""
    fd = _open(path)
    if fd is None:
        return None
    with open(fd, "rb", buffering=0) as file:
        content = bytearray(min(os.fstat(fd).st_size, max_bytes))
        view, at = memoryview(content), 0
        while at < len(content) and (num_bytes := file.readinto(view[at:])):
            at += num_bytes
    return content
