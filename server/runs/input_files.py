"""Files that starts name: resolves their paths and hashes their content, each in its own thread.

A file on a dead mount blocks its caller, and the thread cannot be ended, so each call has its own thread and blocks no
other. asyncio's own threads are few, and the server would wait for them when it ends.
"""

import asyncio
import hashlib
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, ParamSpec, TypeVar

from forebay.core.errors import InputRefused
from forebay.core.settings import Settings
from forebay.core.starts.input_file import InputLimits
from forebay.core.tasks import TaskSet
from forebay.core.waiting import finish

ResultT = TypeVar("ResultT")
Parameters = ParamSpec("Parameters")

MAX_THREADS = 64
"""Maximum number of threads at work or stuck at once."""
STEP_BYTES = 32 << 20
"""Bytes read at a time: a caller that stops waits for no more than one such read."""
MAX_KNOWN = 1_024

FileState = tuple[str, str]
"""An input file in its current state: its name in the payload, and its fingerprint."""


class FileThreads:
    """Threads that do not delay the end of the process. ``wait_s`` is the time limit of one call."""

    def __init__(self, wait_s: float) -> None:
        self.wait_s = wait_s
        self._num_threads = 0

    async def call(
        self, function: Callable[Parameters, ResultT], *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> ResultT:
        """Return ``function``'s result. Raises ``InputRefused`` if it takes too long; its thread is abandoned."""
        try:
            async with asyncio.timeout(self.wait_s):
                return await self.call_patiently(function, *args, **kwargs)
        except TimeoutError:
            raise InputRefused(
                f"the file did not respond within {self.wait_s:g} s",
                hint="check that its disk or mount responds, or raise the server's setting input_wait_s",
                field="input_file",
            ) from None

    async def call_patiently(
        self, function: Callable[Parameters, ResultT], *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> ResultT:
        """Return ``function``'s result without a time limit. Raises ``InputRefused`` if too many threads are stuck."""
        if self._num_threads >= MAX_THREADS:
            raise InputRefused(
                f"{self._num_threads} input files are being read or do not respond",
                hint="retry later; if this persists, a mount with input files is dead",
                field="input_file",
            )
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()

        def end(result: object, error: Exception | None) -> None:
            self._num_threads -= 1
            finish(done, result, error)

        def run() -> None:
            result: object = None
            failure: Exception | None = None
            try:
                result = function(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - the waiting caller gets it
                failure = error
            with suppress(RuntimeError):  # the loop is closed: no caller is waiting
                loop.call_soon_threadsafe(end, result, failure)

        self._num_threads += 1
        self.leave(run)
        found: ResultT = await done
        return found

    def leave(self, function: Callable[[], object]) -> None:
        """Call ``function`` in the background."""
        threading.Thread(target=function, name="forebay-file", daemon=True).start()


class InputFiles:
    """The files that starts may read, and SHA-256 digests of their content.

    Digests are computed once per file, one after the other: files are large, threads few. A digest is kept as long as
    the file is unchanged.
    """

    def __init__(self, settings: Settings, working_dir: Path) -> None:
        self.limits = InputLimits([root.resolve() for root in settings.input_roots], settings.max_input_line_bytes)
        self.threads = FileThreads(settings.input_wait_s)
        self._working_dir = working_dir
        self._known: dict[FileState, str] = {}
        self._reading: dict[FileState, asyncio.Task[str]] = {}
        self._turn = asyncio.Lock()
        self._tasks = TaskSet()

    async def aclose(self) -> None:
        """Stop reading."""
        await self._tasks.cancel()

    # --- paths

    def allowed(self, given: str, field: str = "input_file") -> Path:
        """Resolve a path of a payload, which may block. Raises ``InputRefused`` outside the allowed folders."""
        path = self._resolved(given)
        if not self.limits.allow(path):
            raise InputRefused(
                f"{field} {given!r} is outside the allowed folders",
                hint="the server's setting input_roots lists the folders that starts may read from",
                field=field,
            )
        return path

    async def fingerprint(self, input_file: str | None) -> str:
        """A fingerprint that changes when the input file does."""
        if input_file is None:
            return ""
        try:
            stat = await self.threads.call(lambda: self._resolved(input_file).stat())
        except (OSError, ValueError):  # the check that follows reports it; here it must only differ from any file
            return "unreadable"
        return f"{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}"

    async def num_bytes(self, input_file: str) -> int | None:
        """The current size of the file; None if it cannot be read."""
        return num_bytes_of(await self.fingerprint(input_file))

    def _resolved(self, given: str) -> Path:
        return (self._working_dir / given).resolve()  # also resolves links: one in an allowed folder may lead out of it

    # --- content

    async def digest(self, input_file: str) -> str:
        """The digest in hex; "" if the file cannot be read, is not a file, or changes while it is read."""
        file = (input_file, await self.fingerprint(input_file))
        if file in self._known:
            return self._known[file]
        task = self._reading.get(file)
        if task is None:
            task = self._reading[file] = self._tasks.start(self._read(file))
            task.add_done_callback(lambda _: self._reading.pop(file))
        return await asyncio.shield(task)

    async def digest_within(self, input_file: str, wait_s: float) -> str:
        """The digest, if it is known within ``wait_s`` seconds; else "", and reading continues."""
        try:
            return await asyncio.wait_for(self.digest(input_file), wait_s)
        except TimeoutError:
            return ""

    def known_digest(self, input_file: str | None, fingerprint: str) -> str:
        """The known digest of a file with this fingerprint; "" if it was not read yet."""
        return "" if input_file is None else self._known.get((input_file, fingerprint), "")

    async def digest_at(self, input_file: str, fingerprint: str) -> str:
        """The digest of a file with this fingerprint, read if needed; "" if the file has changed since."""
        if await self.fingerprint(input_file) == fingerprint:
            await self.digest(input_file)
        return self.known_digest(input_file, fingerprint)

    async def _read(self, file: FileState) -> str:
        async with self._turn:
            try:
                digest = await self._sha256(file[0])
            except (OSError, InputRefused):  # the check of the start reports it
                return ""
        if not digest or await self.fingerprint(file[0]) != file[1]:
            return ""
        self._known[file] = digest
        while len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]
        return digest

    async def _sha256(self, input_file: str) -> str:
        whole = hashlib.sha256()
        # Not `with`: closing a file may block as long as reading it.
        file = await self.threads.call(lambda: self.limits.open(self.allowed(input_file)))
        try:
            while await self.threads.call(_add_step, whole.update, file):
                pass
        finally:
            self.threads.leave(file.close)
        return whole.hexdigest()


def _add_step(add: Callable[[bytes], object], file: BinaryIO) -> bool:
    """Add the next step of the file; return whether there was any."""
    num_left = STEP_BYTES
    while num_left and (data := file.read(min(1 << 20, num_left))):
        add(data)
        num_left -= len(data)
    return num_left < STEP_BYTES


def num_bytes_of(fingerprint: str) -> int | None:
    """The size of the file with this fingerprint; None if it could not be read."""
    parts = fingerprint.split(":")
    return int(parts[1]) if len(parts) == 3 else None
