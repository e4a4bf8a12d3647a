"""Requests and reports of a run process. The key in the path gives access to this one run."""

from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import StreamingResponse

from forebay.buffer.admission import announce
from forebay.buffer.buffer import LiveRun
from forebay.buffer.groups.sample_group import SampleGroup
from forebay.buffer.idle_groups import note_groups, note_new_process
from forebay.core.binary_sample import SAMPLES_TYPE
from forebay.core.errors import InvalidInput
from forebay.core.group import GroupState
from forebay.core.ids import InstanceId, group_id, rollout_uid
from forebay.core.run import Run, Tally
from forebay.generators.buffer_link.abc import MAX_COUNT_NAMES, ProgressReport
from forebay.replay.group_frames import first_frame
from forebay.replay.options import ReplayOptions
from forebay.server.routes.groups import follow_closed
from forebay.server.runs.recorded_groups import RecordedGroups, UsableGroup
from forebay.server.runs.steps import follow_steps, step_view
from forebay.server.services import Services, services_of
from forebay.web.request_models import parse_request

GROUPS_AT_ONCE = 100
"""Groups handled before other requests get a turn."""
MAX_REPORT_BYTES = 2 << 20
"""A report is decoded in one piece on the event loop, which takes up to half a second."""
Server = Annotated[Services, Depends(services_of)]

router = APIRouter(prefix="/w/{run_key}", tags=["run process"])


@router.get("/plan")
async def plan(run_key: str, services: Server) -> dict[str, Any]:
    """What the run has already: groups to leave alone, and filled slots of incomplete groups.

    Asking resets the run's groups: no group ages until it is announced again.
    """
    entry = services.buffer.by_key(run_key)
    replay = await _replay(entry.run, services.recorded)
    async with entry.buffer.gone.everything():
        entry.buffer.workers = []
        await note_new_process(entry.buffer)
        return _plan(entry) | {"replay": replay}


def _plan(entry: LiveRun) -> dict[str, Any]:
    groups, settings = entry.buffer.groups, entry.run.settings
    closed, taken = [], []
    for group in groups.by_id.values():
        key = (group.instance_id, group.row.epoch)
        # A full group is judged at the next read; none of its samples must be generated again.
        if group.state is not GroupState.OPEN or groups.is_full(group):
            closed.append(key)
        elif group.slots:
            taken.append((*key, sorted(group.slots), _other_uids(entry.run.run_id, group)))
    return {
        "run_id": entry.run.run_id,
        "group_size": settings.group_size,
        "group_timeout_seconds": settings.group_timeout_seconds,
        "group_deadline_seconds": settings.group_deadline_seconds,
        "closed": closed,
        "taken": taken,
        "is_resumed": groups.num_opened > 0,
        "last_closed_seq": groups.num_closed,
        "oversampling": settings.oversampling.model_dump() if settings.oversampling else None,
        "scheduler": settings.scheduler.model_dump() if settings.scheduler else None,
        "step": step_view(entry.buffer),
    }


async def _replay(run: Run, recorded: RecordedGroups) -> dict[str, Any] | None:
    """How the run's process uses another run's recording; None if it does not."""
    options = ReplayOptions.parse(run.payload.get("replay"))
    if options is None or not options.needs_process:
        return None
    return {"mode": options.mode, "rewards": options.rewards, "groups": await recorded.keys(run)}


def _other_uids(run_id: str, group: SampleGroup) -> list[str]:
    """Uids of a group's samples that are not derived from their slot; no other rollout may use them."""
    rows = (sample.row for sample in group.samples)
    return [row.uid for row in rows if row.uid != rollout_uid(run_id, row.group_id, row.slot)]


@router.post("/gateway")
async def gateway(run_key: str, services: Server) -> dict[str, str]:
    """Start the gateway, register this run, and return its address and the key that opens rollouts."""
    return await services.gateway.admit(services.buffer.by_key(run_key).run)


@router.post("/progress")
async def progress(run_key: str, request: Request, services: Server) -> dict[str, Any]:
    """Record the generator's progress. Groups are announced before their first rollout, so that deadlines count."""
    body = await request.body()
    if len(body) > MAX_REPORT_BYTES:
        raise InvalidInput(f"the report must have at most {MAX_REPORT_BYTES} bytes (got {len(body)})", field="body")
    report = _read_report(body)
    entry = services.buffer.by_key(run_key)  # after the body: the entry may have been replaced while it was read
    _check_counts(report, entry.run)
    for first in range(0, max(1, len(report.opened)), GROUPS_AT_ONCE):
        await announce(entry.buffer, report.opened[first : first + GROUPS_AT_ONCE])
    if not report.is_gateway:
        await note_groups(entry.buffer, report.idle, report.busy)
    if report.short:
        await _close_short(entry, report.short)
    if report.workers is not None:
        entry.buffer.workers = msgspec.to_builtins(report.workers)
    if _apply(report, entry.run):
        await entry.buffer.save_run()
    return {"state": entry.run.state.value}


def _read_report(body: bytes) -> ProgressReport:
    try:
        return msgspec.convert(parse_request(body), ProgressReport)
    except msgspec.ValidationError as error:
        field = str(error).partition("`$.")[2].rstrip("`") or "body"
        raise InvalidInput(f"{field}: {error}"[:500], field=field) from None


def _tally(report: ProgressReport, run: Run) -> Tally:
    return run.gateway_tally if report.is_gateway else run.tally


def _check_counts(report: ProgressReport, run: Run) -> None:
    """Raise ``InvalidInput`` if the run would have too many count names."""
    num_names = len(_tally(report, run).totals.keys() | (report.counts or {}).keys())
    if num_names > MAX_COUNT_NAMES:
        message = f"counts: at most {MAX_COUNT_NAMES} names over all processes of the run (got {num_names})"
        raise InvalidInput(message, hint="count under fewer names", field="counts")


def _apply(report: ProgressReport, run: Run) -> bool:
    """Apply the report to ``run``; return whether anything changed."""
    reported = {
        "is_gateway_waiting" if report.is_gateway else "is_waiting_for_engine": report.waiting_for_engine,
        "is_held": report.held,
        "num_groups_total": report.num_groups_total,
        "is_last_slot_reported": report.is_last_slot_reported,
    }
    changed = {name: value for name, value in reported.items() if value is not None and value != getattr(run, name)}
    for name, value in changed.items():
        setattr(run, name, value)
    has_counted = report.counts is not None and _tally(report, run).report(report.process_id, report.counts)
    return bool(changed) or has_counted


async def _close_short(entry: LiveRun, keys: Sequence[tuple[InstanceId, int]]) -> None:
    async with entry.buffer.lock:
        entry.buffer.check_storage()
        for key in keys:
            group = entry.buffer.groups.by_id.get(group_id(*key))
            if group is not None and group.state is GroupState.OPEN:
                await entry.deadlines.close_short(group, was_salvaged=False)


@router.get("/closed_groups")
async def closed_groups(
    run_key: str,
    services: Server,
    after: Annotated[int, Query(ge=0)] = 0,
    wait_s: Annotated[float, Query(ge=0)] = 0.0,
    seen: int | None = None,
    paused: bool = False,
    still: bool | None = None,
) -> dict[str, Any]:
    """The feed of closed groups, as under ``/v1``; ``seen`` adds the trainer's step and pauses."""
    entry, wait_s = services.buffer.by_key(run_key), min(wait_s, services.settings.max_wait_s)
    if seen is None:
        return await follow_closed(entry, after, wait_s)
    return await follow_steps(entry, after, seen, wait_s, is_paused=paused, is_still=still)


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
    """The recorded samples of a group, or those of another epoch in its place (mode `repeat`)."""
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
