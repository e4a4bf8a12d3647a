"""What a run process asks for where its run replays another one."""

from collections.abc import AsyncIterator
from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, Query
from fastapi.responses import StreamingResponse

from forebay.core.binary_sample import SAMPLES_TYPE
from forebay.core.errors import InvalidInput
from forebay.core.ids import InstanceId, group_id
from forebay.replay.group_frames import first_frame
from forebay.server.runs.recorded_groups import UsableGroup
from forebay.server.services import Services, services_of

Server = Annotated[Services, Depends(services_of)]

router = APIRouter(prefix="/w/{run_key}", tags=["run process"])


@router.get(
    "/recorded/{group_id}",
    response_class=StreamingResponse,
    responses={200: {"content": {SAMPLES_TYPE: {}}}},
)
async def recorded(
    run_key: str,
    group_id: str,
    services: Server,
    instance_id: Annotated[str, Query(description="as JSON")],
    epoch: Annotated[int, Query(ge=0, lt=1 << 63)],
) -> StreamingResponse:
    """The samples that the run's recording has of a group, or of another epoch in its place (mode `repeat`)."""
    instance = _instance(instance_id, epoch, group_id)
    run = services.buffer.by_key(run_key).run
    found = await services.recorded.find(run, instance, epoch)
    return StreamingResponse(_frames(found), media_type=SAMPLES_TYPE)


def _instance(given: str, epoch: int, named: str) -> InstanceId:
    try:
        instance_id: InstanceId = msgspec.json.decode(given, type=str | int)
    except msgspec.DecodeError as error:
        raise InvalidInput(f"instance_id must be JSON, a string or an integer: {error}", field="instance_id") from None
    if group_id(instance_id, epoch) != named:
        raise InvalidInput(f"{named} is not the group of {instance_id!r} in epoch {epoch}", field="instance_id")
    return instance_id


async def _frames(found: UsableGroup) -> AsyncIterator[bytes]:
    yield first_frame(found.head)
    async for frames in found.bodies():
        yield frames
