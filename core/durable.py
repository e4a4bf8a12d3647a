"""Files that last: what is written is on the disk, wholly or not at all, whatever happens to process or machine."""

import os
from pathlib import Path

from forebay.core.private_files import make_folder, opener


def sync_directory(directory: Path) -> None:
    """Return when the names in ``directory`` are on the disk."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_durably(path: Path, *pieces: bytes | memoryview) -> None:
    """Make ``path`` hold ``pieces``, one after the other, wholly or not at all, and wait for the disk."""
    partial = path.with_name(path.name + ".partial")
    try:
        with open(partial, "wb", opener=opener) as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        partial.unlink(missing_ok=True)  # a full disk gets its room back
        raise
    # The rename is atomic, and lasts only once the directory is synced.
    partial.replace(path)
    sync_directory(path.parent)


def make_folder_durably(path: Path) -> None:
    """Make ``path``, and what is missing above it, its owner's alone, and wait for the disk."""
    missing = [folder for folder in (path, *path.parents) if not folder.is_dir()]
    make_folder(path)
    # From the top: the name of each folder is in the one above it.
    for folder in reversed(missing):
        sync_directory(folder.parent)
