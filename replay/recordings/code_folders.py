"""Folders of code: a run's, of which the plain files go into a recording, and those that they become once more."""

import errno
import os
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from forebay.core.errors import InvalidInput, StorageFailed
from forebay.core.files import FOLDER_MODE, make_folder, opener, regular_opener
from forebay.replay.errors import NotRecorded, RecordingDamaged
from forebay.replay.recording_rows import Damage
from forebay.replay.recording_schema import CODE
from forebay.replay.recordings.recorded_code import (
    MAX_CODE_BYTES,
    MAX_CODE_FILE_BYTES,
    MAX_CODE_FILES,
    CodeFile,
    code_content,
    code_files,
    path_problem,
)
from forebay.replay.recordings.recording import Recording


class PlainFile(NamedTuple):
    """A file of a run's code, where it lies."""

    start: int
    path: str
    """As in ``CodeFile``."""
    place: Path


def plain_files(folders: Sequence[tuple[int, Path]]) -> list[PlainFile]:
    """What a recording can have of these folders, each of one start: no links, nothing hidden, nothing compiled.

    Raises ``InvalidInput`` where it is more than a recording takes, ``StorageFailed``.
    """
    found: list[PlainFile] = []
    num_bytes = 0
    for start, folder in folders:
        for parent, inner, names in os.walk(folder, onerror=_refuse):
            inner.sort()
            for name in sorted(names):
                place = Path(parent) / name
                path, size = place.relative_to(folder).as_posix(), _size(place)
                if path_problem(path) or size is None:
                    continue
                found.append(PlainFile(start, path, place))
                num_bytes += size
                if size > MAX_CODE_FILE_BYTES or len(found) > MAX_CODE_FILES or num_bytes > MAX_CODE_BYTES:
                    raise _too_much(place)
    return found


def _size(place: Path) -> int | None:
    """In bytes; None for what is no plain file, or went meanwhile."""
    try:
        facts = place.lstat()
    except OSError as error:
        _refuse(error)
        return None
    return facts.st_size if stat.S_ISREG(facts.st_mode) else None


def read_plain(file: PlainFile) -> bytes:
    """Its content. Raises ``StorageFailed``."""
    try:
        with open(file.place, "rb", opener=regular_opener) as opened:
            content = opened.read(MAX_CODE_FILE_BYTES + 1)
    except OSError as error:
        raise _unreadable(error) from error
    if len(content) > MAX_CODE_FILE_BYTES:
        raise _too_much(file.place)
    return content


class WrittenCode(NamedTuple):
    """What was written out, and what could not be."""

    files: list[CodeFile]
    damage: list[Damage]


def write_code(recording: Recording, folder: Path) -> WrittenCode:
    """Write the code of a recording below the new ``folder``, as ``start-1/…``, without what of it is damaged.

    Nothing is there after an error. Raises ``InvalidInput`` where something is there already, ``NotRecorded`` for a
    file without code, ``StorageFailed``.
    """
    files, name = code_files(recording), recording.path.name
    if not files and not _damage(recording):
        hint = "`forebay recording export RUN FILE --code` writes it, where the server still has a copy"
        raise NotRecorded(f"{name} has no code", hint=hint)
    _make_new(folder)
    try:
        files = [file for file in files if _write(recording, file, folder)]
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if not isinstance(error, OSError) or isinstance(error, StorageFailed):
            raise
        hint = "the folder must be writable, and have room; nothing is left of it"
        raise StorageFailed(error.strerror or str(error), what=f"{folder} cannot be written", hint=hint) from error
    return WrittenCode(files, _damage(recording))


def _damage(recording: Recording) -> list[Damage]:
    return [each for each in recording.damage if each.place.startswith(CODE.name)]


def _make_new(folder: Path) -> None:
    try:
        folder.mkdir(FOLDER_MODE)
    except FileExistsError:
        raise InvalidInput(f"{folder} exists", hint="give another DIR, or remove it", field="code") from None
    except FileNotFoundError:
        parent = str(folder.absolute().parent)
        raise InvalidInput(f"there is no folder {parent!r}", hint="make it first", field="code") from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise StorageFailed(reason, what=f"{folder} cannot be made", hint="give another DIR") from error


def _write(recording: Recording, file: CodeFile, folder: Path) -> bool:
    try:
        content = code_content(recording, file)
    except RecordingDamaged as error:
        recording.damage.append(Damage.of(error, "code"))
        return False
    place = folder / f"start-{file.start}" / file.path
    make_folder(place.parent)
    # All of the folder is ours and new: "x" refuses two names that are one to this file system.
    with open(place, "xb", opener=opener) as opened:
        opened.write(content)
    return True


def _too_much(place: Path) -> InvalidInput:
    bounds = f"{MAX_CODE_FILES:,} files, {MAX_CODE_BYTES >> 20:,} MiB, or {MAX_CODE_FILE_BYTES >> 20:,} MiB in one file"
    hint = "export it without --code, and take the code from the server's data directory"
    return InvalidInput(f"the code of the run is more than {bounds}: at {place}", hint=hint, field="code")


def _refuse(error: OSError) -> None:
    if error.errno != errno.ENOENT:
        raise _unreadable(error)


def _unreadable(error: OSError) -> StorageFailed:
    hint = "it is in runs/ of the data directory; without --code the run can be exported"
    return StorageFailed(error.strerror or str(error), what="the copy of the run's code cannot be read", hint=hint)
