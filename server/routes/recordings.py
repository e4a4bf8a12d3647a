"""A run as a recording, for ``forebay recording export``."""

import logging
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, NamedTuple

from fastapi import APIRouter, Depends
from fastapi.responses import StreamingResponse

from forebay.buffer.journal_source import JournalSource
from forebay.buffer.recorded_group import stretches_of_bodies
from forebay.core.errors import ForebayError
from forebay.replay.chosen_groups import check_bodies, chosen_batches, chosen_groups
from forebay.replay.model import BatchRecord, GroupRecord
from forebay.replay.options import parse_steps
from forebay.replay.recording_secrets import without_secrets
from forebay.replay.recordings.recording_stream import (
    RECORDING_TYPE,
    StreamBatch,
    StreamEnd,
    StreamFailure,
    StreamGroup,
    StreamRun,
    StreamSample,
    frame,
)
from forebay.server.runs.replay_sources import ReplaySources
from forebay.server.services import Services, services_of

Server = Annotated[Services, Depends(services_of)]

router = APIRouter(prefix="/v1/runs/{run_id}", tags=["runs"])
logger = logging.getLogger(__name__)

GROUPS_PER_LOOK = 64


class _Export(NamedTuple):
    """What is to be sent."""

    sources: ReplaySources
    source: JournalSource
    steps: str
    groups: Sequence[GroupRecord]
    batches: Sequence[BatchRecord]


@router.get("/recording", response_class=StreamingResponse, responses={200: {"content": {RECORDING_TYPE: {}}}})
async def recording(run_id: str, services: Server, steps: str | None = None) -> StreamingResponse:
    """The run with its groups, samples, bodies and batches, as frames; with ``steps`` (``50-60,70``) those of these."""
    export = await _prepared(services, run_id, steps)
    return StreamingResponse(_frames(export), media_type=RECORDING_TYPE)


async def _prepared(services: Services, run_id: str, steps: str | None) -> _Export:
    """Raises ``RunNotFound``, ``InvalidInput``, ``NotRecorded`` and ``BodiesGone``, before anything is sent."""
    buffer = services.buffer
    source = JournalSource(buffer.get(run_id).run, buffer.store)
    ranges = None if steps is None else parse_steps(steps)
    groups, batches = await source.groups(), await source.batches()
    if ranges is not None:
        batches = chosen_batches(batches, ranges)
        groups = chosen_groups(groups, batches, ranges)
        steps = ",".join(f"{first}-{last}" if first < last else str(first) for first, last in ranges)
    async with services.sources.kept(run_id):
        await check_bodies(source, groups)
    return _Export(services.sources, source, steps or "", groups, batches)


async def _frames(export: _Export) -> AsyncIterator[bytes]:
    async with export.sources.kept(export.source.run.run_id):
        yield frame(StreamRun(without_secrets(export.source.run), export.steps))
        try:
            # By their numbers, as a file has them, and not as they went out: the batches tell that.
            groups = sorted(export.groups, key=lambda group: group.number)
            for first in range(0, len(groups), GROUPS_PER_LOOK):
                async for piece in _groups(export, groups[first : first + GROUPS_PER_LOOK]):
                    yield piece
        except ForebayError as error:
            logger.error("run %s cannot be exported: %s", export.source.run.run_id, error)
            yield frame(StreamFailure(error.code, error.message, error.hint))
            return
        for batch in export.batches:
            yield frame(StreamBatch(batch))
        yield frame(StreamEnd())


async def _groups(export: _Export, groups: Sequence[GroupRecord]) -> AsyncIterator[bytes]:
    found = await export.source.samples([group.group_id for group in groups])
    for group in groups:
        for part in stretches_of_bodies(found[group.group_id]):
            bodies = await export.source.bodies(part)
            pairs = zip(part, bodies, strict=True)
            yield b"".join(piece for sample, body in pairs for piece in (frame(StreamSample(sample)), frame(body)))
        yield frame(StreamGroup(group))
