"""A run as a recording, for ``forebay recording export``."""

import logging
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, NamedTuple

from fastapi import APIRouter, Depends
from fastapi.responses import StreamingResponse

from forebay.buffer.journal_source import JournalSource
from forebay.buffer.recorded_group import stretches_of_bodies
from forebay.core.errors import BodyUnreadable, ForebayError
from forebay.replay.chosen_groups import check_bodies, chosen_batches, chosen_groups
from forebay.replay.model import BatchRecord, GroupRecord, SampleRecord
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
    left_out: dict[str, str]
    """By id, the groups of which a body cannot be read, and why."""


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
    return _Export(services.sources, source, steps or "", groups, batches, {})


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
        _warn(export)
        yield frame(StreamEnd())


def _warn(export: _Export) -> None:
    if export.left_out:
        first, reason = next(iter(export.left_out.items()))
        facts = export.source.run.run_id, len(export.left_out), first, reason
        logger.warning("run %s was exported without the samples of %d groups; the first is %s: %s", *facts)


async def _groups(export: _Export, groups: Sequence[GroupRecord]) -> AsyncIterator[bytes]:
    found = await export.source.samples([group.group_id for group in groups])
    for group in groups:
        async for piece in _samples(export, group, found[group.group_id]):
            yield piece
        yield frame(StreamGroup(group, export.left_out.get(group.group_id, "")))


async def _samples(export: _Export, group: GroupRecord, samples: Sequence[SampleRecord]) -> AsyncIterator[bytes]:
    """Those of a group, up to the first that cannot be read: then it is left out, with what was sent of it."""
    for part in stretches_of_bodies(samples):
        try:
            bodies = await export.source.bodies(part)
        except BodyUnreadable as error:
            if not all(map(export.source.has_body, part)):  # nothing is damaged: it went before it was held
                raise
            export.left_out[group.group_id] = str(error)
            return
        pairs = zip(part, bodies, strict=True)
        yield b"".join(piece for sample, body in pairs for piece in (frame(StreamSample(sample)), frame(body)))
