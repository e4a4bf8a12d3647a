"""What input files hold: a digest of each, read beside the event loop, and known as long as the file stays as it is."""

import asyncio
import hashlib
from collections.abc import Callable
from typing import BinaryIO

from forebay.core.errors import InputRefused
from forebay.core.tasks import TaskSet
from forebay.server.runs.start_checks import InputCheck, num_bytes_of

STEP_BYTES = 32 << 20
"""Read at a time: whoever gives up waits for no more than that."""
MAX_KNOWN = 1_024

File = tuple[str, str]
"""An input file as it is now: what a payload calls it, and its fingerprint."""


class InputContents:
    """SHA-256 digests of input files. Each is computed once, and one after the other: files are large, threads few."""

    def __init__(self, check: InputCheck) -> None:
        self._check = check
        self._known: dict[File, str] = {}
        self._reading: dict[File, asyncio.Task[str]] = {}
        self._turn = asyncio.Lock()
        self._tasks = TaskSet()

    async def aclose(self) -> None:
        """Give up whatever is being read."""
        await self._tasks.cancel()

    async def of(self, input_file: str) -> str:
        """The digest in hex; "" for a file that cannot be read, is none, or changes while it is read."""
        file = (input_file, await self._check.fingerprint(input_file))
        if file in self._known:
            return self._known[file]
        task = self._reading.get(file)
        if task is None:
            task = self._reading[file] = self._tasks.start(self._read(file))
            task.add_done_callback(lambda _: self._reading.pop(file))
        return await asyncio.shield(task)

    async def read_within(self, input_file: str, wait_s: float) -> str:
        """The digest, if it is ``known`` within ``wait_s`` seconds; else "", and it is read on."""
        try:
            return await asyncio.wait_for(self.of(input_file), wait_s)
        except TimeoutError:
            return ""

    def known(self, input_file: str | None, fingerprint: str) -> str:
        """The digest of a file that had this fingerprint; "" if it was not read yet."""
        return "" if input_file is None else self._known.get((input_file, fingerprint), "")

    async def of_start(self, input_file: str, fingerprint: str) -> str:
        """The digest that a file had when it had this fingerprint; "" if it has changed since."""
        if await self._check.fingerprint(input_file) == fingerprint:
            await self.of(input_file)
        return self.known(input_file, fingerprint)

    async def num_bytes(self, input_file: str) -> int | None:
        """The size of the file as it is now; None for one that cannot be read."""
        return num_bytes_of(await self._check.fingerprint(input_file))

    async def _read(self, file: File) -> str:
        async with self._turn:
            try:
                digest = await self._sha256(file[0])
            except (OSError, InputRefused):  # the check of the start says so
                return ""
        if not digest or await self._check.fingerprint(file[0]) != file[1]:
            return ""
        self._known[file] = digest
        while len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]
        return digest

    async def _sha256(self, input_file: str) -> str:
        check, whole = self._check, hashlib.sha256()
        # Not `with`: to close a file may take as long as to read it.
        file = await check.threads.call(lambda: check.limits.open(check.allowed(input_file)))
        try:
            while await check.threads.call(_add_step, whole.update, file):
                pass
        finally:
            check.threads.leave(file.close)
        return whole.hexdigest()


def _add_step(add: Callable[[bytes], object], file: BinaryIO) -> bool:
    """Whether there was anything left to add."""
    num_left = STEP_BYTES
    while num_left and (data := file.read(min(1 << 20, num_left))):
        add(data)
        num_left -= len(data)
    return num_left < STEP_BYTES
