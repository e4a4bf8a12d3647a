"""Folders that a command keeps things in."""

import errno
import os
from pathlib import Path

from forebay.core.errors import InvalidInput


def make_writable(folder: Path) -> Path:
    """``folder``, made if it is not there. Raises ``InvalidInput`` where nothing can be written in it."""
    reason = ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or str(error)
    if not reason and not os.access(folder, os.W_OK | os.X_OK):
        reason = os.strerror(errno.EACCES)
    if reason:
        hint = "give --data-dir a folder that this user may write in"
        raise InvalidInput(f"{folder} cannot be used: {reason}", hint=hint, field="data_dir")
    return folder
