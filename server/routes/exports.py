"""Downloads of a whole run: its recording, for ``forebay recording export``, and its trace."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from fastapi import APIRouter, Depends, Query
from fastapi.responses import StreamingResponse

from forebay.buffer.journal_source import JournalSource
from forebay.buffer.recorded_group import stretches_of_bodies
from forebay.core.errors import BodyUnreadable, ForebayError
from forebay.core.files import regular_opener
from forebay.core.records.rows import BatchRow, GroupRow, StoredSample
from forebay.replay.options import parse_steps
from forebay.replay.recording_export import RECORDING_TYPE, RecordEncoder
from forebay.replay.recording_secrets import without_secrets
from forebay.replay.step_filter import check_bodies, chosen_batches, chosen_groups, named_groups
from forebay.server.runs.replay_sources import ReplaySources
from forebay.server.services import Services, services_of
from forebay.telemetry.tracing.read_trace import bounded_lines, trace_files

Server = Annotated[Services, Depends(services_of)]

router = APIRouter(prefix="/v1/runs/{run_id}", tags=["runs"])
logger = logging.getLogger(__name__)

GROUPS_PER_LOOK = 64
TRACE_CHUNK_BYTES = 1 << 20
NDJSON = "application/x-ndjson"


@router.get("/trace", response_class=StreamingResponse, responses={200: {"content": {NDJSON: {}}}})
async def trace(run_id: str, services: Server, kind: Literal["rollout"] | None = None) -> StreamingResponse:
    """The lines of all files of the run's trace, each file's header first. Returns what is there without waiting.

    ``kind`` selects the summaries of rollouts.
    """
    services.buffer.get(run_id)
    own = services.traces.get(run_id)
    await asyncio.to_thread(own.flush)
    start = b'{"kind":"%s"' % kind.encode() if kind else b""
    return StreamingResponse(_trace_lines(services.traces.folder_of(run_id), start), media_type=NDJSON)


async def _trace_lines(folder: Path, start: bytes) -> AsyncIterator[bytes]:
    for path in await asyncio.to_thread(trace_files, folder):
        try:
            file = await asyncio.to_thread(open, path, "rb", TRACE_CHUNK_BYTES, opener=regular_opener)
        except OSError:  # the budget removed it, or the run's own code replaced it
            continue
        with file:
            lines = bounded_lines(file)
            while piece := await asyncio.to_thread(_whole_lines, lines, start):
                yield piece


def _whole_lines(lines: Iterator[tuple[int, bytes]], start: bytes) -> bytes:
    """The next complete lines that begin with ``start``, in batches. An incomplete last line may still grow."""
    found: list[bytes] = []
    size = 0
    while size < TRACE_CHUNK_BYTES and (line := next(lines, (0, b""))[1]).endswith(b"\n"):
        if line.startswith(start):
            found.append(line)
            size += len(line)
    return b"".join(found)


class _Export(NamedTuple):
    """A prepared export."""

    sources: ReplaySources
    source: JournalSource
    groups: Sequence[GroupRow]
    batches: Sequence[BatchRow]
    encoder: RecordEncoder
    is_partial: bool
    """Whether groups whose bodies were removed are left out, instead of refusing the export."""
    has_bodies: bool
    """Whether bodies are sent; otherwise every body is empty."""


@router.get("/recording", response_class=StreamingResponse, responses={200: {"content": {RECORDING_TYPE: {}}}})
async def recording(
    run_id: str,
    services: Server,
    steps: str | None = None,
    groups: Annotated[list[str], Query()] = [],  # noqa: B006 - FastAPI copies it
    partial: bool = False,
    bodies: bool = True,
) -> StreamingResponse:
    """The run as a file: groups, samples, bodies and batches.

    ``steps`` (``50-60,70``) selects steps, ``groups`` ids or instances. ``partial`` leaves out the samples of groups
    whose bodies were removed, instead of refusing the export. Without ``bodies``, all bodies are empty.
    """
    export = await _prepared(services, run_id, steps, groups, is_partial=partial, has_bodies=bodies)
    return StreamingResponse(_records(export), media_type=RECORDING_TYPE)


async def _prepared(
    services: Services, run_id: str, steps: str | None, names: Sequence[str], *, is_partial: bool, has_bodies: bool
) -> _Export:
    """Collect what to export before anything is sent.

    Raises ``RunNotFound``, ``InvalidInput``, ``NotRecorded``, ``BodiesGone``, and ``MissingExtra`` without zstandard.
    """
    buffer = services.buffer
    source = JournalSource(buffer.get(run_id).run, buffer.store)
    ranges = None if steps is None else parse_steps(steps)
    groups, batches = await source.groups(), await source.batches()
    if ranges is not None:
        batches = chosen_batches(batches, ranges)
        groups = chosen_groups(groups, batches, ranges)
        steps = ",".join(f"{first}-{last}" if first < last else str(first) for first, last in ranges)
    if names:
        groups = named_groups(groups, names)
        ids = {group.group_id for group in groups}
        batches = [batch for batch in batches if not ids.isdisjoint(batch.group_ids)]
    if has_bodies and not is_partial:
        async with services.sources.kept(run_id):
            await check_bodies(source, groups)
    encoder = RecordEncoder(without_secrets(source.run), steps or "")
    return _Export(services.sources, source, groups, batches, encoder, is_partial, has_bodies)


async def _records(export: _Export) -> AsyncIterator[bytes]:
    encoder = export.encoder
    async with export.sources.kept(export.source.run.run_id):
        yield encoder.run()
        try:
            # By number, as a file stores them. The batches record the order of delivery.
            groups = sorted(export.groups, key=lambda group: group.number)
            for first in range(0, len(groups), GROUPS_PER_LOOK):
                async for piece in _groups(export, groups[first : first + GROUPS_PER_LOOK]):
                    yield piece
        except ForebayError as error:
            logger.error("run %s cannot be exported: %s", export.source.run.run_id, error)
            yield encoder.end(error)
            return
        for batch in export.batches:
            yield encoder.batch(batch)
        if left_out := encoder.made.left_out:
            facts = export.source.run.run_id, len(left_out), left_out[0]
            logger.warning("run %s was exported without the samples of %d groups; the first is %s", *facts)
        yield encoder.end()


async def _groups(export: _Export, groups: Sequence[GroupRow]) -> AsyncIterator[bytes]:
    found = await export.source.samples([group.group_id for group in groups])
    for group in groups:
        left_out = ""
        if export.is_partial and export.has_bodies and not all(map(export.source.has_body, found[group.group_id])):
            yield export.encoder.group(group, "retention has removed bodies of its samples")
            continue
        try:
            async for piece in _samples(export, found[group.group_id]):
                yield piece
        except BodyUnreadable as error:
            if not all(map(export.source.has_body, found[group.group_id])):  # not damaged: removed before the hold
                raise
            left_out = str(error)
        yield export.encoder.group(group, left_out)


async def _samples(export: _Export, samples: Sequence[StoredSample]) -> AsyncIterator[bytes]:
    """The bodies of a group's samples, up to the first unreadable one. Raises ``BodyUnreadable``."""
    for part in stretches_of_bodies(samples):
        bodies = await export.source.bodies(part) if export.has_bodies else [b""] * len(part)
        yield await asyncio.to_thread(export.encoder.samples, part, bodies)
