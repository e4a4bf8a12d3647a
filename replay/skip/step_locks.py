"""One execution of a step at a time, also across processes: locks on files, which die with their holder.

``flock`` is asked again and again instead of being waited for: a thread that waits would be one less for what the
holder has to do. Tasks of one event loop queue before it, so that one of them asks.
"""

import asyncio
import fcntl
import logging
import os
import socket
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import ParamSpec, TypeVar

from forebay.core.backoff import Backoff
from forebay.core.files import FILE_MODE, make_folder_durably

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

FIRST_PAUSE_S = 0.01
LONGEST_PAUSE_S = 0.25
LOGGED_EVERY_S = 30.0
"""How often a log line names the process that is waited for."""


async def off_loop(function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Call ``function`` in a thread. Where the task is cancelled, what has begun is ended first."""
    task = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        # A lock must not be given back while a thread still writes under it.
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # looked at: asyncio would complain of an exception that nobody saw
        raise


class StepLock:
    """A file that one holder at a time has locked, whichever thread or process it is in."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None

    def try_acquire(self) -> bool:
        """Whether it is ours now. Raises ``OSError`` where the folder cannot be written to, or has no locks."""
        make_folder_durably(self.path.parent)
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        _held.add(self)
        if not self._is_the_file():
            self.release()
            return False
        self._name_holder()
        return True

    def _is_the_file(self) -> bool:
        """Whether the name still leads to what was locked: somebody may have removed all dumps meanwhile."""
        with suppress(FileNotFoundError):
            return self._fd is not None and os.path.samestat(os.fstat(self._fd), self.path.stat())
        return False

    def _name_holder(self) -> None:
        # For whoever waits; nothing depends on it.
        with suppress(OSError):
            if self._fd is not None:
                os.ftruncate(self._fd, 0)
                os.pwrite(self._fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def holder(self) -> str:
        """Who has it, as they wrote themselves."""
        with suppress(OSError):
            return self.path.read_text(encoding="utf-8", errors="replace")[:200].strip() or "another process"
        return "another process"

    def release(self) -> None:
        """Let others have it. Does nothing where it is not held."""
        fd, self._fd = self._fd, None
        _held.discard(self)
        if fd is not None:
            # Unlocked by name: where a child was forked meanwhile, it has the file open as well.
            with suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)

    def forget(self) -> None:
        """In a forked child: the lock is the parent's, and must end with the parent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


_held: "weakref.WeakSet[StepLock]" = weakref.WeakSet()


def _forget_all() -> None:
    for lock in list(_held):
        lock.forget()
    _held.clear()


os.register_at_fork(after_in_child=_forget_all)


class _Patience:
    """The pauses of one who waits for a lock, and what is logged meanwhile."""

    def __init__(self, lock: StepLock) -> None:
        self._lock = lock
        self._backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        self._began_s = self._logged_s = time.monotonic()

    def next_s(self) -> float:
        now = time.monotonic()
        if now - self._logged_s >= LOGGED_EVERY_S:
            self._logged_s = now
            logger.warning(
                "waiting for %s for %.0f s: %s has it", self._lock.path, now - self._began_s, self._lock.holder()
            )
        return self._backoff.next_s()

    async def wait(self) -> None:
        await asyncio.sleep(self.next_s())


@contextmanager
def hold(path: Path) -> Iterator[None]:
    """Have ``path`` locked; waits for it. Raises ``OSError``."""
    lock = StepLock(path)
    patience = _Patience(lock)
    try:
        while not lock.try_acquire():
            time.sleep(patience.next_s())
        yield
    finally:
        lock.release()


@asynccontextmanager
async def hold_off_loop(path: Path) -> AsyncIterator[None]:
    """The same for a task; nothing of it is done on the event loop."""
    lock = StepLock(path)
    patience = _Patience(lock)
    async with _queue(path):
        try:
            while not await off_loop(lock.try_acquire):
                await patience.wait()
            yield
        finally:
            await off_loop(lock.release)


_queues: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, weakref.WeakValueDictionary[Path, asyncio.Lock]]"
_queues = weakref.WeakKeyDictionary()


def _queue(path: Path) -> asyncio.Lock:
    """Where tasks of this event loop queue for ``path``; it is there as long as somebody has it in hand."""
    of_loop = _queues.setdefault(asyncio.get_running_loop(), weakref.WeakValueDictionary())
    return of_loop.setdefault(path, asyncio.Lock())
