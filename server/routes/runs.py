"""Runs: start, list, inspect, stop, read the log; and the generators available for a start."""

import asyncio
from collections.abc import Sequence
from enum import Enum
from itertools import dropwhile, islice
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel, ConfigDict

from forebay.core.run import check_name
from forebay.server.services import Services, services_of
from forebay.server.views import run_view, storage_view
from forebay.web.request_models import Step, parse, parse_request

Server = Annotated[Services, Depends(services_of)]

router = APIRouter(prefix="/v1")
RUNS: list[str | Enum] = ["runs"]


class EvaluationRequest(BaseModel):
    """The body of ``…/evaluations``."""

    model_config = ConfigDict(extra="forbid")

    task: str
    step: Step


@router.post("/runs", status_code=201, tags=RUNS)
async def start(request: Request, services: Server) -> dict[str, Any]:
    """Start a run. The whole object is passed to ``run_rollout``; ``name`` is a label, ``run_id`` attaches to a run."""
    payload = parse_request(await request.body())
    # A null name means none: clients send fields that they have no value for.
    run = await services.runs.start(payload, check_name(str(payload.get("name") or "")), "native")
    return _view(run.run_id, services)


@router.get("/runs", tags=RUNS)
async def list_runs(
    services: Server,
    limit: Annotated[int, Query(ge=1, le=1_000)] = 100,
    before: str = "",
    name: str | None = None,
    prefix: str = "",
) -> dict[str, Any]:
    """List a page of runs, newest first, and the total storage; ``before`` is the last ``run_id`` of the previous page.

    ``name`` selects runs with this name, ``prefix`` runs whose id or name begins with it.
    """
    runs = iter([entry.run for entry in reversed(services.buffer.entries)])
    if before:
        last = services.buffer.get(before).run
        runs = islice(dropwhile(lambda run: run is not last, runs), 1, None)
    named = (run for run in runs if name in (None, run.name))
    found = (run for run in named if run.run_id.startswith(prefix) or run.name.startswith(prefix))
    return {
        "runs": _views([run.run_id for run in islice(found, limit)], services),
        "storage": storage_view(services.buffer.store.stats(), services.retention),
    }


@router.get("/runs/{run_id}", tags=RUNS)
async def show(run_id: str, services: Server) -> dict[str, Any]:
    """One run: its state, and counts of its groups and samples."""
    return _view(run_id, services)


@router.post("/runs/{run_id}/stop", tags=RUNS)
async def stop(run_id: str, services: Server) -> dict[str, Any]:
    """Stop the run's process. Its data is kept, and complete groups can still be read."""
    await services.runs.stop(run_id)
    return _view(run_id, services)


@router.delete("/runs/{run_id}", tags=RUNS)
async def remove(run_id: str, services: Server) -> dict[str, Any]:
    """Remove a run that has ended, with all its stored data."""
    # An open trace could create the run's folder again.
    await asyncio.to_thread(services.traces.get(services.buffer.get(run_id).run.run_id).rest)
    await services.runs.remove(run_id, services.retention)
    services.traces.forget(run_id)
    return {"run_id": run_id}


@router.post("/runs/{run_id}/evaluations", status_code=201, tags=RUNS)
async def evaluate(run_id: str, request: Request, services: Server) -> dict[str, Any]:
    """Evaluate the run's current weights on one of its tasks; the run's ``evaluations`` have the result."""
    asked = parse(EvaluationRequest, await request.body())
    return await services.evaluations.start(run_id, asked.task, asked.step)


@router.get("/runs/{run_id}/log", tags=RUNS)
async def log(
    run_id: str, services: Server, lines: Annotated[int, Query(ge=1, le=10_000)] = 100, uid: str | None = None
) -> dict[str, Any]:
    """The last lines that the run's processes printed; with ``uid``, those of a sample's agent that is a command."""
    if uid is None:
        return {"lines": await services.runs.log_tail(run_id, lines)}
    return {"lines": await services.runs.agent_log_tail(run_id, uid, lines)}


@router.get("/generators", tags=["generators"])
async def list_generators(services: Server) -> dict[str, Any]:
    """Rescan and list every generator file with its task type, hooks and status; failed ones with a traceback."""
    return {"generators": [info.as_json() for info in await services.catalog.scan()]}


def _view(run_id: str, services: Services) -> dict[str, Any]:
    return _views([run_id], services)[0]


def _views(run_ids: Sequence[str], services: Services) -> list[dict[str, Any]]:
    views = [run_view(services.buffer.get(run_id)) for run_id in run_ids]
    evaluations = services.evaluations.views_of(run_ids)
    return [
        {**view, "evaluations": evaluations[run_id], "trace": services.traces.get(run_id).view()}
        for run_id, view in zip(run_ids, views, strict=True)
    ]
