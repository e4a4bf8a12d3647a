"""Files for nobody but their owner: samples, logs and code copies are, whatever the umask says."""

import os
import stat
from pathlib import Path

FOLDER_MODE = 0o700
FILE_MODE = 0o600
OTHERS = 0o077


def opener(path: str, flags: int) -> int:
    """For ``open(…, opener=opener)``: a file that is made by it is its owner's alone."""
    return os.open(path, flags, FILE_MODE)


def make_folder(path: Path) -> None:
    """Make ``path``, and what is missing above it, its owner's alone; what is there stays as it is."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(FOLDER_MODE, exist_ok=True)


def make_private(path: Path) -> int:
    """Take the rights of all others off ``path`` and what is below it; how many had some. Links are not followed.

    What its owner may execute stays so. Raises ``OSError``, as where it belongs to somebody else.
    """
    return sum(_narrow(each) for each in (path, *_below(path)))


def _below(path: Path) -> list[Path]:
    return [Path(folder) / name for folder, folders, files in os.walk(path) for name in (*folders, *files)]


def _narrow(path: Path) -> bool:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:  # it went meanwhile
        return False
    if stat.S_ISLNK(mode) or not mode & OTHERS:
        return False
    path.chmod(stat.S_IMODE(mode) & ~OTHERS)
    return True
