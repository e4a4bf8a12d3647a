"""The trace of a run, as its processes have written it so far."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, BinaryIO

from fastapi import APIRouter, Depends
from fastapi.responses import StreamingResponse

from forebay.server.services import Services, services_of
from forebay.telemetry.tracing.read_trace import trace_files

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
            file = await asyncio.to_thread(path.open, "rb")
        except FileNotFoundError:  # the budget took it
            continue
        with file:
            while piece := await asyncio.to_thread(_whole_lines, file):
                yield piece


def _whole_lines(file: BinaryIO) -> bytes:
    """The next lines, some at a time; half a line at the end of a file is left out, since it may still grow."""
    piece = file.read(CHUNK_BYTES)
    if not piece.endswith(b"\n"):
        piece += file.readline()
    return piece[: piece.rfind(b"\n") + 1]
