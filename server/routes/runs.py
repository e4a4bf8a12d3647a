"""Runs: start, list, inspect, stop, read the log."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request

from forebay.core.run import check_name
from forebay.server.services import Services, body_of, services_of
from forebay.server.views import run_view, storage_view
from forebay.web.request_models import parse_object

Server = Annotated[Services, Depends(services_of)]

router = APIRouter(prefix="/v1/runs", tags=["runs"])


@router.post("", status_code=201)
async def start(request: Request, services: Server) -> dict[str, Any]:
    """Start a run. The whole object is handed to ``run_rollout``; ``name`` is a label, ``run_id`` attaches to a run."""
    payload = parse_object(await body_of(request))
    run = await services.runs.start(payload, check_name(str(payload.get("name") or "")), "native")
    return run_view(services.buffer.get(run.run_id))


@router.get("")
async def list_runs(services: Server) -> dict[str, Any]:
    """Every run, oldest first, and what is stored of all of them."""
    return {
        "runs": [run_view(entry) for entry in services.buffer.entries],
        "storage": storage_view(services.buffer.store.stats(), services.retention.num_bytes_over),
    }


@router.get("/{run_id}")
async def show(run_id: str, services: Server) -> dict[str, Any]:
    """One run: its state, and its groups and samples in numbers."""
    return run_view(services.buffer.get(run_id))


@router.post("/{run_id}/stop")
async def stop(run_id: str, services: Server) -> dict[str, Any]:
    """End the run's process. Its data stays, and what is complete can still be read."""
    await services.runs.stop(run_id)
    return run_view(services.buffer.get(run_id))


@router.get("/{run_id}/log")
async def log(run_id: str, services: Server, lines: Annotated[int, Query(ge=1, le=10_000)] = 100) -> dict[str, Any]:
    """The last lines that the run's processes printed."""
    return {"lines": services.runs.log_tail(run_id, lines)}
