"""The trace of a run, as its processes have written it so far."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Depends
from fastapi.responses import StreamingResponse

from forebay.core.files import regular_opener
from forebay.server.services import Services, services_of
from forebay.telemetry.tracing.read_trace import bounded_lines, trace_files

Server = Annotated[Services, Depends(services_of)]

router = APIRouter(prefix="/v1/runs/{run_id}", tags=["runs"])

CHUNK_BYTES = 1 << 20
NDJSON = "application/x-ndjson"


@router.get("/trace", response_class=StreamingResponse, responses={200: {"content": {NDJSON: {}}}})
async def trace(run_id: str, services: Server) -> StreamingResponse:
    """The lines of all files of the run's trace, each file's head in front of its own. Nothing is waited for."""
    services.buffer.get(run_id)
    own = services.traces.get(run_id)
    await asyncio.to_thread(own.flush)
    return StreamingResponse(_lines(services.traces.folder_of(run_id)), media_type=NDJSON)


async def _lines(folder: Path) -> AsyncIterator[bytes]:
    for path in await asyncio.to_thread(trace_files, folder):
        try:
            file = await asyncio.to_thread(open, path, "rb", CHUNK_BYTES, opener=regular_opener)
        except OSError:  # the budget took it, or the run's own code has put something else there
            continue
        with file:
            lines = bounded_lines(file)
            while piece := await asyncio.to_thread(_whole_lines, lines):
                yield piece


def _whole_lines(lines: Iterator[tuple[int, bytes]]) -> bytes:
    """The next lines, some at a time; half a line at the end of a file is left out, since it may still grow."""
    found: list[bytes] = []
    size = 0
    while size < CHUNK_BYTES and (line := next(lines, (0, b""))[1]).endswith(b"\n"):
        found.append(line)
        size += len(line)
    return b"".join(found)
