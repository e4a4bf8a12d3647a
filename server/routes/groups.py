"""Groups: inspect them, and follow those that close."""

import json
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query

from forebay.buffer import resume
from forebay.buffer.buffer import LiveRun
from forebay.core.binary_sample import as_json
from forebay.core.errors import GroupNotFound
from forebay.core.group import GroupState
from forebay.core.waiting import Deadline
from forebay.server.services import Services, services_of
from forebay.server.views import closed_since, group_view, sample_view

Server = Annotated[Services, Depends(services_of)]

router = APIRouter(prefix="/v1/runs/{run_id}", tags=["groups"])


@router.get("/groups")
async def list_groups(
    run_id: str,
    services: Server,
    state: GroupState | None = None,
    after: str = "",
    limit: Annotated[int, Query(ge=1, le=1_000)] = 100,
) -> dict[str, Any]:
    """List a page of groups in opening order; ``after`` is the last ``group_id`` of the previous page."""
    entry = services.buffer.get(run_id)
    rows = await services.buffer.store.groups(run_id, state=state.value if state else None, after=after, limit=limit)
    # The store has the order; memory is newer, and has the groups that may still change.
    known = entry.buffer.groups.by_id
    return {"groups": [group_view(known[row.group_id].row if row.group_id in known else row) for row in rows]}


@router.get("/groups/{group_id}")
async def show_group(run_id: str, group_id: str, services: Server, bodies: bool = False) -> dict[str, Any]:
    """One group and its samples, including late and surplus ones; ``bodies`` adds the bodies that are still stored."""
    group = services.buffer.get(run_id).buffer.groups.by_id.get(group_id)
    store = services.buffer.store
    [found] = await store.find(run_id, [group_id], has_uids=False)
    row = group.row if group else found.row
    if row is None:
        raise GroupNotFound(run_id, group_id)
    stored = await store.samples(run_id, group_id)
    # Retention may remove a segment at any time, so one check serves both fields.
    readable = [store.holds(sample.location) for sample in stored]
    samples = [sample_view(sample, has_body=has_body) for sample, has_body in zip(stored, readable, strict=True)]
    if bodies:
        raw = iter(await store.read([s.location for s, has_body in zip(stored, readable, strict=True) if has_body]))
        for sample in samples:
            sample["body"] = json.loads(as_json(next(raw))) if sample["has_body"] else None
    return {**group_view(row), "samples": samples}


@router.get("/closed_groups")
async def closed_groups(
    run_id: str, services: Server, after: Annotated[int, Query(ge=0)] = 0, wait_s: Annotated[float, Query(ge=0)] = 0.0
) -> dict[str, Any]:
    """Groups that closed after number ``after``; waits up to ``wait_s`` for the next one."""
    wait_s = min(wait_s, services.settings.max_wait_s)
    return await follow_closed(services.buffer.get(run_id), after, wait_s)


async def follow_closed(entry: LiveRun, after: int, wait_s: float) -> dict[str, Any]:
    """The feed of closed groups, for the native route and for run processes."""
    deadline = Deadline(wait_s)
    groups = entry.buffer.groups
    while groups.num_closed <= after and not entry.run.has_ended and await deadline.wait(entry.buffer.news):
        pass
    return await closed_since(entry, after)


@router.get("/skip_instance_ids")
async def skip_instance_ids(run_id: str, services: Server) -> dict[str, Any]:
    """The ids that this run need not generate again, one entry per finished epoch."""
    return {"skip_instance_ids": await resume.skip_instance_ids(services.buffer.get(run_id).buffer)}
