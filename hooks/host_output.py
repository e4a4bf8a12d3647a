"""Output of a hook host, written to a file of limited size."""

import asyncio
import os
from contextlib import suppress
from pathlib import Path
from typing import Self, cast

from forebay.core.files import make_folder
from forebay.telemetry.output_file import OutputFile

LIMIT_BYTES = 32 << 20
"""Default size limit of the file."""
BYTES_PER_S = 32 << 20
"""Maximum rate of reading a host's output. A host that prints more blocks, as on a slow terminal."""
DRAIN_S = 1.0
"""Wait for the end of the output, which a process outside the host's session may hold back."""


class HostOutput(asyncio.Protocol):
    """The reading end of a pipe. ``writer`` is the host's end: close it once the host has it."""

    def __init__(self, file: OutputFile) -> None:
        self.writer = -1
        self._file = file
        self._ended = asyncio.Event()
        self._left_bytes = BYTES_PER_S
        self._transport: asyncio.ReadTransport

    @classmethod
    async def open(cls, path: Path, limit_bytes: int) -> Self:
        """Create the folder, open the file and create a pipe. Raises OSError."""
        make_folder(path.parent)
        output = cls(OutputFile(path, limit_bytes))
        reader, output.writer = os.pipe()
        await asyncio.get_running_loop().connect_read_pipe(lambda: output, os.fdopen(reader, "rb", buffering=0))
        return output

    async def close(self) -> None:
        """Read the rest of the output once its writers are gone, and close the file."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), DRAIN_S)
        self._transport.close()
        await self._ended.wait()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        self._transport = cast(asyncio.ReadTransport, transport)

    def data_received(self, data: bytes) -> None:
        """Called by the loop."""
        self._file.write(data)
        self._left_bytes -= len(data)
        if self._left_bytes <= 0:
            self._transport.pause_reading()
            asyncio.get_running_loop().call_later(1.0, self._resume)

    def _resume(self) -> None:
        self._left_bytes = BYTES_PER_S
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def connection_lost(self, _: Exception | None) -> None:
        """Called by the loop."""
        self._file.close()
        self._ended.set()
