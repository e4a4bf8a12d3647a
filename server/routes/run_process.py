"""What the base generator in a run process asks and tells. The key in the path opens this one run."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel, ConfigDict, Field

from forebay.core.group import GroupState
from forebay.core.ids import InstanceId
from forebay.server.requests import parse
from forebay.server.routes.groups import follow_closed
from forebay.server.services import Services, body_of, services_of

Server = Annotated[Services, Depends(services_of)]

router = APIRouter(prefix="/w/{run_key}", tags=["run process"])


class Progress(BaseModel):
    """What a base generator reports. What is left out stays as it was."""

    model_config = ConfigDict(extra="ignore", strict=True)

    # A JSON array becomes a tuple; what is in it stays strict.
    opened: list[Annotated[tuple[InstanceId, Annotated[int, Field(ge=0)]], Field(strict=False)]] = []
    waiting_for_engine: bool | None = None
    num_groups_total: int | None = None
    is_last_slot_reported: bool | None = None


@router.get("/plan")
async def plan(run_key: str, services: Server) -> dict[str, Any]:
    """What the run holds already: groups to leave alone, and the slots of incomplete groups that are there."""
    entry = services.buffer.by_key(run_key)
    groups, settings = entry.buffer.groups, entry.run.settings
    closed, taken = [], []
    for group in groups.by_id.values():
        key = (group.instance_id, group.row.epoch)
        if group.state is not GroupState.OPEN or groups.is_full(group):
            closed.append(key)
        elif group.slots:
            taken.append((*key, sorted(group.slots)))
    return {
        "run_id": entry.run.run_id,
        "group_size": settings.group_size,
        "group_timeout_seconds": settings.group_timeout_seconds,
        "group_deadline_seconds": settings.group_deadline_seconds,
        "closed": closed,
        "taken": taken,
        "is_resumed": bool(groups.by_id),
        "last_closed_seq": len(groups.closed),
    }


@router.post("/progress")
async def progress(run_key: str, request: Request, services: Server) -> dict[str, Any]:
    """Note what the generator is doing. Groups are announced before their first rollout, so that deadlines count."""
    told = parse(Progress, await body_of(request))
    entry = services.buffer.by_key(run_key)
    await entry.buffer.announce(told.opened)
    run = entry.run
    before = (run.is_waiting_for_engine, run.num_groups_total, run.is_last_slot_reported)
    if told.waiting_for_engine is not None:
        run.is_waiting_for_engine = told.waiting_for_engine
    if told.num_groups_total is not None:
        run.num_groups_total = told.num_groups_total
    if told.is_last_slot_reported is not None:
        run.is_last_slot_reported = told.is_last_slot_reported
    if before != (run.is_waiting_for_engine, run.num_groups_total, run.is_last_slot_reported):
        await entry.buffer.save_run()
    return {"state": run.state.value}


@router.get("/closed_groups")
async def closed_groups(
    run_key: str, services: Server, after: Annotated[int, Query(ge=0)] = 0, wait_s: Annotated[float, Query(ge=0)] = 0.0
) -> dict[str, Any]:
    """The feed of closed groups, as under ``/v1``."""
    return await follow_closed(services.buffer.by_key(run_key), after, min(wait_s, services.settings.max_wait_s))
