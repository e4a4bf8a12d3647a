"""The weights of a run's engines: announce them, change them, and pause the engines meanwhile."""

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, ConfigDict, Field, model_validator

from forebay.core.weight_versions import Loaded, PauseMode
from forebay.engines import weight_updates
from forebay.engines.router_workers import admin_client
from forebay.server.engine_pauses import Announce, RunEngines
from forebay.server.engine_watch import worker_view
from forebay.server.runs.steps import announce
from forebay.server.services import Services, services_of
from forebay.web.replies import ClientGone
from forebay.web.request_models import Step, parse

Server = Annotated[Services, Depends(services_of)]

router = APIRouter(prefix="/v1/runs/{run_id}", tags=["weights"])

PAUSE_LIMIT_S = 600.0


class WeightVersionRequest(BaseModel):
    """The body of ``…/weight_version``."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    weight_version: Step
    mode: PauseMode | None = None
    model_path: Annotated[str, Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _has_weights(self) -> "WeightVersionRequest":
        if self.mode and not self.model_path:
            raise ValueError("mode needs model_path; weights loaded another way need …/engines/pause and continue")
        return self


class PauseRequest(BaseModel):
    """The body of ``…/engines/pause``."""

    model_config = ConfigDict(extra="forbid")

    mode: PauseMode = "abort"
    limit_s: Annotated[float, Field(gt=0, le=86_400)] = PAUSE_LIMIT_S


class ContinueRequest(BaseModel):
    """The body of ``…/engines/continue``."""

    model_config = ConfigDict(extra="forbid")

    weight_version: Step | None = None


@router.put("/weight_version")
async def set_weight_version(run_id: str, request: Request, services: Server) -> dict[str, Any]:
    """Announce the trainer's current weights, with any version; with ``model_path`` the engines load them first."""
    asked = parse(WeightVersionRequest, await request.body())
    announcement = _announcement(run_id, services)
    if asked.model_path is None:
        await announcement(Loaded(asked.weight_version))
        return {"weight_version": asked.weight_version}
    # The update announces the version, between the pause and the first token of the new weights.
    engines, mode = RunEngines.of(services.buffer.get(run_id).run), asked.mode or "abort"
    await _make_way(run_id, request, services)
    done = await services.pauses.update(engines, asked.weight_version, asked.model_path, mode, announcement)
    return {"weight_version": asked.weight_version, "mode": mode, **done}


@router.post("/engines/pause")
async def pause_engines(run_id: str, request: Request, services: Server) -> dict[str, Any]:
    """Pause the run's engines; replies when they are idle. They resume on request, or after ``limit_s`` seconds."""
    asked = parse(PauseRequest, await request.body() or b"{}")
    engines = RunEngines.of(services.buffer.get(run_id).run)
    await _make_way(run_id, request, services)
    pause = await services.pauses.pause(engines, asked.mode, asked.limit_s)
    return {"mode": pause.mode, "limit_s": pause.limit_s, "workers": pause.urls}


@router.post("/engines/continue")
async def continue_engines(run_id: str, request: Request, services: Server) -> dict[str, Any]:
    """Resume paused engines; a version names the weights that the trainer has loaded."""
    asked = parse(ContinueRequest, await request.body() or b"{}")
    version = asked.weight_version
    was_paused = await services.pauses.resume(run_id, version, _announcement(run_id, services))
    return {"weight_version": version, "was_paused": was_paused}


@router.get("/engines")
async def list_engines(run_id: str, services: Server) -> dict[str, Any]:
    """The current workers of the run's engines, and the active pause of its trainer, if any."""
    engines, record = RunEngines.of(services.buffer.get(run_id).run), services.pauses.of(run_id)
    pause = record and {"mode": record.mode, "limit_s": record.limit_s, "until_s": record.until_s}
    async with admin_client(engines.api_key) as http:
        workers = await asyncio.gather(*map(worker_view, await weight_updates.workers_of(http, engines.urls)))
    return {"workers": workers, "pause": pause}


async def _make_way(run_id: str, request: Request, services: Services) -> None:
    """Let evaluations end before an update. Raises ``ClientGone`` if the trainer left meanwhile."""
    await services.evaluations.make_way(run_id)
    if await request.is_disconnected():
        raise ClientGone


def _announcement(run_id: str, services: Services) -> Announce:
    """A function that announces weights to the buffer. Raises ``RunNotFound``; the function ``StorageFailed``."""
    buffer = services.buffer.get(run_id).buffer

    async def announcement(loaded: Loaded) -> None:
        await services.evaluations.make_way(run_id, loaded)
        buffer.check_storage()  # before memory differs from the disk
        announce(buffer, loaded)
        await buffer.save_run()

    return announcement
