"""A run as a recording, for ``forebay recording export``."""

import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, NamedTuple

from fastapi import APIRouter, Depends
from fastapi.responses import StreamingResponse

from forebay.buffer.buffer import Buffer
from forebay.buffer.journal_source import JournalSource
from forebay.buffer.store.abc import stretches
from forebay.core.errors import BodiesGone, BodyUnreadable, ForebayError
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
from forebay.server.services import Services, services_of

Server = Annotated[Services, Depends(services_of)]

router = APIRouter(prefix="/v1/runs/{run_id}", tags=["runs"])
logger = logging.getLogger(__name__)

GROUPS_PER_LOOK = 64
STRETCH_BYTES = 1 << 20
"""Of bodies, what is in memory at a time; a longer one stands alone."""


class _Export(NamedTuple):
    """What is to be sent."""

    buffer: Buffer
    source: JournalSource
    steps: str
    groups: Sequence[GroupRecord]
    batches: Sequence[BatchRecord]


@router.get("/recording", response_class=StreamingResponse, responses={200: {"content": {RECORDING_TYPE: {}}}})
async def recording(run_id: str, services: Server, steps: str | None = None) -> StreamingResponse:
    """The run with its groups, samples, bodies and batches, as frames; with ``steps`` (``50-60,70``) those of these."""
    export = await _prepared(services.buffer, run_id, steps)
    return StreamingResponse(_frames(export), media_type=RECORDING_TYPE)


async def _prepared(buffer: Buffer, run_id: str, steps: str | None) -> _Export:
    """Raises ``RunNotFound``, ``InvalidInput``, ``NotRecorded`` and ``BodiesGone``, before anything is sent."""
    source = JournalSource(buffer.get(run_id).run, buffer.store)
    ranges = None if steps is None else parse_steps(steps)
    groups, batches = await source.groups(), await source.batches()
    if ranges is not None:
        batches = chosen_batches(batches, ranges)
        groups = chosen_groups(groups, batches, ranges)
        steps = ",".join(f"{first}-{last}" if first < last else str(first) for first, last in ranges)
    with _kept(buffer, run_id):
        try:
            await check_bodies(source, groups)
        except BodiesGone:
            # Those of a segment that is about to be removed may be about to have another place.
            await buffer.store.wait_for_removals()
            await check_bodies(source, groups)
    return _Export(buffer, source, steps or "", groups, batches)


@contextmanager
def _kept(buffer: Buffer, run_id: str) -> Iterator[None]:
    """Let no body of the run go."""
    buffer.sources[run_id] += 1
    try:
        yield
    finally:
        buffer.sources[run_id] -= 1


async def _frames(export: _Export) -> AsyncIterator[bytes]:
    with _kept(export.buffer, export.source.run.run_id):
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
        for part, _ in stretches(found[group.group_id], lambda sample: sample.place[2], STRETCH_BYTES):
            bodies = await _bodies(export, part)
            pairs = zip(part, bodies, strict=True)
            yield b"".join(piece for sample, body in pairs for piece in (frame(StreamSample(sample)), frame(body)))
        yield frame(StreamGroup(group))


async def _bodies(export: _Export, samples: Sequence[SampleRecord]) -> Sequence[bytes]:
    try:
        return await export.source.bodies(samples)
    except BodyUnreadable:
        # It may have been moved since its place was looked up.
        await export.buffer.store.wait_for_removals()
        group_id = samples[0].group_id
        places = {each.uid: each for each in (await export.source.samples([group_id]))[group_id]}
        return await export.source.bodies([places.get(each.uid, each) for each in samples])
