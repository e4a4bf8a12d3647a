"""slime's routes except those that carry samples, at the root and once for every named stream."""

import asyncio
import time
from hashlib import blake2b
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request

from forebay.core.errors import ForebayError
from forebay.core.group import GroupState
from forebay.core.run import WORKING, Run, RunState, check_name
from forebay.server.routes.sample_routes import by_name
from forebay.server.runs.resumed_run import what_is_left
from forebay.server.services import Services, services_of
from forebay.web.request_models import parse_object, parse_request

Server = Annotated[Services, Depends(services_of)]

router = APIRouter(tags=["slime"])

REMEMBER_REFUSALS_S = 30.0
MAX_REFUSALS = 256


class Refusals:
    """Remembers refused starts, to delay the answer to a client that repeats one without pause."""

    def __init__(self) -> None:
        self._seen: dict[bytes, float] = {}

    def is_repeated(self, body: bytes) -> bool:
        """Record this refusal; return whether the same body was refused recently."""
        key, now_s = blake2b(body, digest_size=16).digest(), time.monotonic()
        is_repeated = now_s - self._seen.get(key, -REMEMBER_REFUSALS_S) < REMEMBER_REFUSALS_S
        self._seen.pop(key, None)  # to the end of the order: the oldest is dropped first
        self._seen[key] = now_s
        while len(self._seen) > MAX_REFUSALS:
            del self._seen[next(iter(self._seen))]
        return is_repeated


@router.get("/")
@router.get("/s/{name}/")
async def greet(name: str = "") -> dict[str, Any]:
    """Report that the buffer is alive."""
    return {"message": "Forebay rollout buffer is running", "name": name}


@router.post("/start_rollout")
@router.post("/s/{name}/start_rollout")
async def start_rollout(request: Request, services: Server, name: str = "") -> dict[str, Any]:
    """Start a run under ``name``, or attach to the run that the payload or its ``skip_instance_ids`` belong to."""
    body = await request.body()
    try:
        run = await services.runs.start(parse_request(body), check_name(name), "slime")
    except ForebayError:
        refusals: Refusals = request.app.state.refusals
        if refusals.is_repeated(body):  # slime's client retries at once, forever
            await asyncio.sleep(services.settings.refuse_hold_s)
        raise
    # slime's client prints the reply.
    notes = {"note": what_is_left(services.buffer, run), "warnings": run.warnings}
    shown = {name: value for name, value in notes.items() if value}
    return {"message": "Rollout started", "run_id": run.run_id, "state": run.state.value, **shown}


@router.get("/buffer/peek")
@router.get("/s/{name}/buffer/peek")
async def peek(services: Server, name: str = "") -> dict[str, Any]:
    """Preview the oldest groups that could be read, without taking them."""
    entry = by_name(services.buffer, name)
    # Only a preview: bodies are read from disk, and samples may be large.
    groups = entry.buffer.groups.in_state(GroupState.READY, GroupState.OPEN)[:5]
    data = []
    for group in groups:
        samples = group.samples[:2]
        bodies = await entry.buffer.json_bodies(samples)
        # Readers get 1 for a reward of true.
        rewards = [{} if sample.row.reward is None else {"reward": sample.row.reward} for sample in samples]
        data += [parse_object(body) | reward for body, reward in zip(bodies, rewards, strict=True)]
    return {"success": True, "message": f"{len(data)} samples", "data": {"data": data, "meta_info": {}}}


@router.get("/buffer/stats")
@router.get("/s/{name}/buffer/stats")
async def stats(services: Server, name: str = "") -> dict[str, Any]:
    """Counts of what is buffered, received and delivered."""
    entry = by_name(services.buffer, name)
    buffer = entry.buffer
    data = {
        "current_size": buffer.groups.num_live_samples,
        "max_size": entry.run.settings.max_buffer_size,
        "total_written": sum(buffer.counts[outcome] for outcome in ("member", "failed", "late", "surplus")),
        "total_read": buffer.counts["rows_delivered"],
    }
    return {"success": True, "message": "", "data": {"data": [data], "meta_info": {}}}


@router.get("/rollout_status")
@router.get("/s/{name}/rollout_status")
async def rollout_status(services: Server, name: str = "") -> dict[str, Any]:
    """The status of the run of ``name``, as ``job``; null if none was started."""
    entry = services.buffer.newest(name)
    return {"job": None if entry is None else _job(entry.run)}


@router.post("/stop_rollout")
@router.post("/s/{name}/stop_rollout")
async def stop_rollout(services: Server, name: str = "") -> dict[str, Any]:
    """Stop the run of ``name``; replies once its process has ended. Its groups can still be read."""
    entry = services.buffer.newest(name)
    if entry is None:
        return {"had_job": False, "stopped": True, "job": None}
    await services.runs.stop(entry.run.run_id)
    return {"had_job": True, "stopped": entry.run.state not in WORKING, "job": _job(entry.run)}


def _job(run: Run) -> dict[str, Any]:
    return {
        "job_id": run.run_id,
        "status": "starting" if run.state is RunState.VALIDATING else run.state.value,
        "alive": run.state in WORKING,
        "stop_requested": run.state is RunState.STOPPED,
        "started_at": run.started_at_s,
        "error": run.reason if run.state is RunState.FAILED else None,
    }
