"""The copies of code that judged a run, in its file: what each entry may be called, and reading those that are whole.

Whoever made a file may have put anything into it: an entry that no copy has is damage, whatever its checksum says.
"""

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import NamedTuple

from forebay.core.errors import ForebayError
from forebay.replay.recording_reader import RecordingReader
from forebay.replay.recording_rows import Damage, Values
from forebay.replay.recording_schema import CODE

MAX_CODE_FILES = 50_000
MAX_CODE_FILE_BYTES = 64 << 20
MAX_CODE_BYTES = 512 << 20
"""Of all files together."""
MAX_PATH_BYTES = 1_000
MAX_NAME_BYTES = 255
MAX_STARTS = 1_000_000
COMPILED = frozenset({".pyc", ".pyo"})
BYTECODE_FOLDER = "__pycache__"


class CodeFile(NamedTuple):
    """A file of the code that judged a run."""

    number: int
    """Its place in the file of the recording, from 1."""
    start: int
    """Of which start of the run, from 1."""
    path: str
    """Below the folder of that start's code, with ``/`` between its names."""
    num_bytes: int


def path_problem(path: object) -> str:
    """Why no entry of code may be called ``path``; "" if one may."""
    if not isinstance(path, str) or not _is_text(path):
        return "its path is no text"
    if len(path.encode()) > MAX_PATH_BYTES or any(len(name.encode()) > MAX_NAME_BYTES for name in path.split("/")):
        return "its path is too long"
    # By its own names, before any library makes another path of them.
    if path.startswith("/") or "\\" in path or not {"", ".", ".."}.isdisjoint(path.split("/")):
        return f"its path, {path!r:.100}, leads out of its folder"
    # Programs that look into a folder obey what is hidden there, and Python what is compiled, unread.
    if any(name.startswith(".") or name == BYTECODE_FOLDER for name in path.split("/")):
        return f"its path, {path!r:.100}, is hidden, or of compiled code"
    if PurePosixPath(path).suffix in COMPILED:
        return f"its path, {path!r:.100}, is of compiled code"
    return ""


def code_files(recording: RecordingReader) -> list[CodeFile]:
    """The files of code that can be read, by starts; ``damage`` of the recording gets the others."""
    found, bad = list[CodeFile](), list[Damage]()
    for each in _entries(recording):
        if isinstance(each, Damage):
            bad.append(each)
        else:
            found.append(each)
    num = _num_written(recording)
    if num not in (None, len(found)) and not bad:
        bad.append(Damage(CODE.name, f"{len(found)} of {num} rows are there"))
    recording.damage += [each for each in bad if each not in recording.damage]
    return sorted(found, key=lambda file: (file.start, file.path))


def code_content(recording: RecordingReader, file: CodeFile) -> bytes:
    """The bytes of a file of code. Raises ``RecordingDamaged``."""
    place = f"code {file.number} (start {file.start}, {file.path!r:.200})"
    rows = recording.tables.ask(place, "SELECT content FROM code WHERE number = ?", file.number)
    try:
        return recording.frames.content(rows[0][0] if rows else None, file.num_bytes, most=MAX_CODE_FILE_BYTES)
    except ValueError as error:
        raise recording.tables.damaged(Damage(place, str(error))) from None


def _entries(recording: RecordingReader) -> Iterator[CodeFile | Damage]:
    if not recording.tables.ask("the database", "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'code'"):
        return
    num_bytes, taken = 0, _Taken()
    for count, row in enumerate(recording.tables.scan(CODE, _num_written(recording)), 1):
        if isinstance(row, Damage):
            yield row
            continue
        problem = _problem(row) or taken.problem(row[1], row[2])
        if problem:
            yield Damage(f"code {row[0]}", problem)
            continue
        num_bytes += row[3]
        if num_bytes > MAX_CODE_BYTES or count > MAX_CODE_FILES:
            bounds = f"more than {MAX_CODE_FILES:,} files, or {MAX_CODE_BYTES:,} bytes, are never written"
            yield Damage(f"code {row[0]} and what follows", bounds)
            return
        yield CodeFile(*row[:4])


def _num_written(recording: RecordingReader) -> int | None:
    try:
        return recording.made.num_code_files
    except ForebayError:  # it is damaged, which others tell, or is not of a run
        return None


def _problem(row: Values) -> str:
    _, start, path, num_bytes, *_ = row
    if not isinstance(start, int) or not 1 <= start <= MAX_STARTS:
        return "its start is none"
    if not isinstance(num_bytes, int) or not 0 <= num_bytes <= MAX_CODE_FILE_BYTES:
        return f"its length is none, or more than {MAX_CODE_FILE_BYTES:,} bytes"
    return path_problem(path)


class _Taken:
    """Which paths files have, and which folders."""

    def __init__(self) -> None:
        self._files: set[tuple[int, str]] = set()
        self._folders: set[tuple[int, str]] = set()

    def problem(self, start: int, path: str) -> str:
        """Why no further file may lie there; "" if it may, and then does."""
        above = {(start, str(folder)) for folder in PurePosixPath(path).parents}
        if (start, path) in self._files | self._folders or not self._files.isdisjoint(above):
            return f"another entry is at its path, {path!r:.100}"
        self._files.add((start, path))
        self._folders |= above
        return ""


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text
