"""On ``PYTHONPATH`` of a server: each sync of a file takes ``SYNC_S`` seconds longer."""

import os
import sys
import time
from collections.abc import Callable


def _slowed(sync: Callable[[int], None]) -> Callable[[int], None]:
    def slow_sync(fd: int) -> None:
        time.sleep(float(os.environ["SYNC_S"]))
        sync(fd)

    return slow_sync


if "serve" in sys.orig_argv:  # its run processes inherit the path
    os.fsync, os.fdatasync = _slowed(os.fsync), _slowed(os.fdatasync)
