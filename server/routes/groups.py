"""Groups: inspect them, and follow those that close."""

import json
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query

from forebay.buffer import resume
from forebay.buffer.buffer import LiveRun
from forebay.core.backoff import Deadline
from forebay.core.binary_sample import as_json
from forebay.core.errors import BatchNotFound, GroupNotFound
from forebay.core.group import GroupState
from forebay.core.ids import group_id as name_group
from forebay.core.records.rows import GroupRow
from forebay.server.services import Services, services_of
from forebay.server.views import closed_since, group_view, sample_view

Server = Annotated[Services, Depends(services_of)]

router = APIRouter(prefix="/v1/runs/{run_id}", tags=["groups"])

NEAR_EPOCHS = 25
"""Epochs before and after a group's own that ``…/epochs`` looks up, besides the newest ones."""


@router.get("/groups")
async def list_groups(
    run_id: str,
    services: Server,
    state: GroupState | None = None,
    after: str = "",
    limit: Annotated[int, Query(ge=1, le=1_000)] = 100,
    samples: bool = False,
    batch: str = "",
    newest: bool = False,
) -> dict[str, Any]:
    """List a page of groups in opening order, or ``newest`` first; ``after`` is the previous page's last ``group_id``.

    ``samples`` adds what ``GET …/groups/{group_id}`` shows of each group's samples. ``batch`` lists the groups that
    this batch delivered, then those that it reported as discarded, and ignores ``after``.
    """
    entry, store = services.buffer.get(run_id), services.buffer.store
    if batch:
        found_rows = (await _of_batch(entry, batch)).values()
        rows = [row for row in found_rows if state in (None, row.state)][:limit]
    else:
        wanted = state.value if state else None
        rows = await store.groups(run_id, state=wanted, after=after, limit=limit, newest=newest)
    # The store has the order; memory is newer, and has the groups that may still change.
    known = entry.buffer.groups.by_id
    views = [group_view(known[row.group_id].row if row.group_id in known else row) for row in rows]
    if samples:
        found = await store.samples_of(run_id, [row.group_id for row in rows])
        for view in views:
            stored = (sample for sample in found[view["group_id"]] if sample.row.is_sample)
            view["samples"] = [sample_view(sample, has_body=store.holds(sample.location)) for sample in stored]
    return {"groups": views}


async def _of_batch(entry: LiveRun, batch_id: str) -> dict[str, GroupRow]:
    """The groups of a batch, in order. Raises ``BatchNotFound``."""
    known = await entry.buffer.gone.batch_rows_of([batch_id]) | entry.buffer.batches.by_id
    if batch_id not in known:
        raise BatchNotFound(entry.run.run_id, batch_id)
    wanted = [*known[batch_id].group_ids, *known[batch_id].reported_ids]
    rows = await group_rows(entry, wanted)
    return {key: rows[key] for key in wanted if key in rows}


async def group_rows(entry: LiveRun, group_ids: Sequence[str]) -> dict[str, GroupRow]:
    """The current rows of these groups, as far as they exist. Raises ``StorageFailed``."""
    stored = await entry.buffer.gone.rows_of(group_ids)
    known = entry.buffer.groups.by_id
    return stored | {key: known[key].row for key in group_ids if key in known}


@router.get("/groups/{group_id}")
async def show_group(run_id: str, group_id: str, services: Server, bodies: bool = False) -> dict[str, Any]:
    """One group and its samples, including late and surplus ones; ``bodies`` adds the bodies that are still stored."""
    group = services.buffer.get(run_id).buffer.groups.by_id.get(group_id)
    store = services.buffer.store
    [found] = await store.find(run_id, [group_id], has_uids=False)
    row = group.row if group else found.row
    if row is None:
        raise GroupNotFound(run_id, group_id)
    stored = [sample for sample in await store.samples(run_id, group_id) if sample.row.is_sample]
    # Retention may remove a segment at any time, so one check serves both fields.
    readable = [store.holds(sample.location) for sample in stored]
    samples = [sample_view(sample, has_body=has_body) for sample, has_body in zip(stored, readable, strict=True)]
    if bodies:
        raw = iter(await store.read([s.location for s, has_body in zip(stored, readable, strict=True) if has_body]))
        for sample in samples:
            sample["body"] = json.loads(as_json(next(raw))) if sample["has_body"] else None
    return {**group_view(row), "samples": samples}


@router.get("/groups/{group_id}/epochs")
async def list_epochs(run_id: str, group_id: str, services: Server) -> dict[str, Any]:
    """The groups of the same instance in all near epochs and the newest, each with its step and its rewards."""
    entry, store = services.buffer.get(run_id), services.buffer.store
    [own] = await store.find(run_id, [group_id], has_uids=False)
    known = entry.buffer.groups.by_id
    row = known[group_id].row if group_id in known else own.row
    if row is None:
        raise GroupNotFound(run_id, group_id)
    near = range(max(0, row.epoch - NEAR_EPOCHS), row.epoch + NEAR_EPOCHS + 1)
    ids = [name_group(row.instance_id, epoch) for epoch in near]
    found = await store.find(run_id, ids, [row.instance_id], has_uids=False)
    rows = {each.group_id: each.row for each in found if each.row is not None}
    rows = {key: known[key].row if key in known else each for key, each in rows.items()} | {group_id: row}
    samples = await store.samples_of(run_id, list(rows))
    batches = await store.find_batches(run_id, [each.batch_id for each in rows.values() if each.batch_id])
    steps = {batch.batch_id: batch.step for batch in batches}
    views = [
        group_view(each)
        | {"step": steps.get(each.batch_id or ""), "rewards": [s.row.reward for s in samples[key] if s.row.is_rewarded]}
        for key, each in rows.items()
    ]
    return {"groups": sorted(views, key=lambda view: int(view["epoch"]))}


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
