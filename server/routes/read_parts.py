"""Routes that send the parts of samples."""

from typing import Annotated

from fastapi import APIRouter, Depends
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict

from forebay.buffer.buffer import Buffer
from forebay.buffer.parts import find_parts
from forebay.buffer.store.abc import Slice
from forebay.core.errors import StorageFailed
from forebay.core.parts import PART_LENGTH, PARTS_TYPE
from forebay.core.records.rows import BatchRow
from forebay.server.direct_send import direct_reply, watched
from forebay.server.routes.bodies import DOWNLOAD
from forebay.server.routes.sample_routes import SampleCall, SamplePaths, SampleRoute
from forebay.server.routes.tensor_replies import STRETCH_BYTES, Stored, read_pieces
from forebay.server.services import Services, services_of
from forebay.web.replies import ClientGone, send_reply
from forebay.web.request_models import parse

Server = Annotated[Services, Depends(services_of)]

router = APIRouter(prefix="/v1/runs/{run_id}", tags=["groups"])

_HEADER = (b"content-type", PARTS_TYPE.encode())

IDLE_S = 600.0
"""Seconds that a client may read nothing of a reply."""


class PartsRequest(BaseModel):
    """Body of ``…/batches/{batch_id}/parts``."""

    model_config = ConfigDict(extra="forbid")

    parts: list[str]


class BatchParts(SampleRoute):
    """Serves ``/v1/runs/{run_id}/batches/{batch_id}/parts``: parts of the batch's groups, in the order asked."""

    async def answer(self, call: SampleCall) -> None:
        digests = parse(PartsRequest, call.body.data).parts
        buffer, row = call.entry.buffer, await read_batch(call)
        places = await find_parts(buffer, row.group_ids, digests, f"batch {row.batch_id!r}")
        pieces: list[Stored] = []
        for at in places:
            pieces += (PART_LENGTH.pack(at.length), Slice(at, 0, at.length, is_proved=True))
        # The last piece is sent by the framework, which ends the reply.
        pieces.append(b"")
        usual = read_pieces(buffer.store, pieces)
        reply = direct_reply(call.scope, _HEADER, buffer.store, pieces, sum(map(len, pieces)), usual)
        try:
            with watched(call.scope, lambda idle_s: IDLE_S - idle_s):
                await send_reply(call.send, reply, lambda: False, _is_last)
        except StorageFailed as error:  # the reply has begun, so the error can only close the connection
            raise ClientGone from error


async def read_batch(call: SampleCall) -> BatchRow:
    """The batch that a path names. Raises ``BatchNotFound``, and ``LeaseLost`` if its groups went to another batch."""
    leases = call.entry.delivery.leases
    async with leases.steady([call.scope["path"].split("/")[-2]]) as [row]:
        leases.check(row)
    return row


async def _is_last() -> bool:
    return True


@router.get("/groups/{group_id}/parts/{digest}", response_class=StreamingResponse)
async def read_part(run_id: str, group_id: str, digest: str, services: Server) -> StreamingResponse:
    """The bytes of one part of a group's samples."""
    buffer = services.buffer.get(run_id).buffer
    [at] = await find_parts(buffer, [group_id], [digest], f"group {group_id!r}")
    starts = range(0, at.length, STRETCH_BYTES)
    slices = [Slice(at, start, min(start + STRETCH_BYTES, at.length), is_proved=True) for start in starts]
    headers = {**DOWNLOAD, "Content-Length": str(at.length)}
    content = (b"".join(pieces) async for pieces in read_pieces(buffer.store, slices))
    return StreamingResponse(content, media_type="application/octet-stream", headers=headers)


PATHS: SamplePaths = {("v1/runs", "batches/*/parts"): (BatchParts(), Buffer.get)}
