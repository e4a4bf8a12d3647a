"""Private, durable and regular files.

Private: only the owner can access samples, logs and code copies, whatever the umask. Durable: a file is on disk
completely or not at all. ``regular_opener`` opens only regular files, since a run's own code may replace some.
"""

import os
import stat
from pathlib import Path

FOLDER_MODE = 0o700
FILE_MODE = 0o600
OTHERS = 0o077
_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def opener(path: str, flags: int) -> int:
    """For ``open(…, opener=opener)``: makes a new file private to its owner."""
    return os.open(path, flags, FILE_MODE)


def regular_opener(path: str, flags: int) -> int:
    """An ``opener`` for files that a run's code may replace. Never waits; follows no link at the end of ``path``.

    Raises ``OSError`` for anything except a regular file.
    """
    descriptor = opener(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY)
    try:
        check_regular(descriptor)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def check_regular(descriptor: int) -> None:
    """Raise ``OSError`` unless ``descriptor`` refers to a regular file."""
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "something else")
        raise OSError(0, f"Is {kind}, not a regular file")


def make_folder(path: Path) -> None:
    """Make ``path`` and its missing parents, private to their owner; existing folders are unchanged."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(FOLDER_MODE, exist_ok=True)


def make_private(path: Path) -> int:
    """Remove all other users' permissions from ``path`` and its contents; returns how many had some. Skips links.

    Execute permissions of the owner stay. Raises ``OSError``, for example if another user owns it.
    """
    return sum(_narrow(each) for each in (path, *_below(path)))


def _below(path: Path) -> list[Path]:
    return [Path(folder) / name for folder, folders, files in os.walk(path) for name in (*folders, *files)]


def _narrow(path: Path) -> bool:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:  # it was deleted meanwhile
        return False
    if stat.S_ISLNK(mode) or not mode & OTHERS:
        return False
    path.chmod(stat.S_IMODE(mode) & ~OTHERS)
    return True


def sync_directory(directory: Path) -> None:
    """Return when the names in ``directory`` are on disk."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_durably(path: Path, *pieces: bytes | memoryview) -> None:
    """Make ``path`` contain ``pieces``, one after another, completely or not at all, and wait for the disk."""
    partial = path.with_name(path.name + ".partial")
    try:
        with open(partial, "wb", opener=opener) as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        partial.unlink(missing_ok=True)  # frees the room on a full disk
        raise
    # The rename is atomic, but durable only once the directory is synced.
    partial.replace(path)
    sync_directory(path.parent)


def make_folder_durably(path: Path) -> None:
    """Make ``path`` and its missing parents, private to their owner, and wait for the disk."""
    missing = [folder for folder in (path, *path.parents) if not folder.is_dir()]
    make_folder(path)
    # From the top, because each folder's name is stored in its parent.
    for folder in reversed(missing):
        sync_directory(folder.parent)
