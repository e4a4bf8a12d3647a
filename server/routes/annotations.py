"""Routes of annotations: a trainer stores its own numbers of the samples it has read, and reads them again."""

from collections.abc import AsyncIterator, Sequence
from typing import Annotated

from fastapi import APIRouter, Depends, Query
from fastapi.responses import StreamingResponse

from forebay.buffer.buffer import Buffer
from forebay.buffer.notes import AnnotatedBatch, find_notes
from forebay.buffer.store.abc import Store, stretches
from forebay.core.errors import BodyTooLarge, BodyUnreadable, InvalidInput
from forebay.core.parts import PartsGone
from forebay.core.records.notes import read_key, read_note
from forebay.core.records.rows import StoredSample
from forebay.server.routes.exports import NDJSON
from forebay.server.routes.read_parts import read_batch
from forebay.server.routes.sample_routes import SampleCall, SamplePaths, SampleRoute
from forebay.server.routes.tensor_replies import STRETCH_BYTES
from forebay.server.routes.write_samples import Answer, WriteRequest, send_results
from forebay.server.services import Services, services_of
from forebay.web.replies import encode

Server = Annotated[Services, Depends(services_of)]

router = APIRouter(prefix="/v1/runs/{run_id}", tags=["batches"])


class Annotate(SampleRoute):
    """Serves ``/v1/runs/{run_id}/batches/{batch_id}/annotations``: one note, an array, or frames with parts."""

    async def answer(self, call: SampleCall) -> None:
        request = await WriteRequest.read(call)
        batch = AnnotatedBatch(call.entry.buffer, await read_batch(call))
        await batch.look_up()
        answers = [await _add(batch, item, request) for item in request.items]
        await send_results(call, request, answers)


async def _add(batch: AnnotatedBatch, item: bytes, request: WriteRequest) -> Answer:
    try:
        note, side = read_note(item)
        side, num_tokens = await batch.place(note, side)
        return batch.add(note, side, request.parts_of(side, num_tokens))
    except (InvalidInput, BodyTooLarge, PartsGone, BodyUnreadable) as error:  # the others are still stored
        return error


@router.get("/annotations", response_class=StreamingResponse, responses={200: {"content": {NDJSON: {}}}})
async def read_annotations(
    run_id: str,
    services: Server,
    step: int | None = None,
    uid: str | None = None,
    group: str = "",
    after: Annotated[str, Query(pattern=r"^$|^\d{10}\.\d{6}-")] = "",
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1_000,
) -> StreamingResponse:
    """A page of the run's annotations in the order of arrival, one per line; ``after`` is the last line's ``id``."""
    buffer = services.buffer.get(run_id).buffer
    found = await find_notes(buffer, step, uid, group, after, limit)
    return StreamingResponse(_lines(buffer.store, found), media_type=NDJSON)


async def _lines(store: Store, notes: Sequence[StoredSample]) -> AsyncIterator[bytes]:
    for some, _ in stretches(notes, lambda each: each.location.length, STRETCH_BYTES):
        bodies = await store.read([each.location for each in some])
        yield b"".join(_line(each, body) for each, body in zip(some, bodies, strict=True))


def _line(note: StoredSample, body: bytes) -> bytes:
    row = note.row
    added = {"id": read_key(row)[0], "group_id": row.group_id, "received_at_s": row.received_at_s}
    return encode(added)[:-1] + b"," + body[1:] + b"\n"


PATHS: SamplePaths = {("v1/runs", "batches/*/annotations"): (Annotate(), Buffer.get)}
