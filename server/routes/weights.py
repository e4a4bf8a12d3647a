"""The weights of a run's engines: announcing them, changing them, and pausing the engines meanwhile."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, ConfigDict, Field, model_validator

from forebay.core.weight_versions import PauseMode
from forebay.engines import weight_updates
from forebay.engines.admin import WorkerAdmin, admin_client
from forebay.server.engine_pauses import RunEngines
from forebay.server.routes.steps import announce
from forebay.server.services import Services, body_of, services_of
from forebay.web.request_models import Step, parse

Server = Annotated[Services, Depends(services_of)]

router = APIRouter(prefix="/v1/runs/{run_id}", tags=["weights"])

PAUSE_LIMIT_S = 600.0


class WeightUpdate(BaseModel):
    """``…/weight_version``."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    weight_version: Step
    mode: PauseMode | None = None
    model_path: Annotated[str, Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _has_weights(self) -> "WeightUpdate":
        if self.mode and not self.model_path:
            raise ValueError("mode needs model_path; weights that come another way need …/engines/pause and continue")
        return self


class PauseRequest(BaseModel):
    """``…/engines/pause``."""

    model_config = ConfigDict(extra="forbid")

    mode: PauseMode = "abort"
    limit_s: Annotated[float, Field(gt=0, le=86_400)] = PAUSE_LIMIT_S


class ContinueRequest(BaseModel):
    """``…/engines/continue``."""

    model_config = ConfigDict(extra="forbid")

    weight_version: Step | None = None


@router.put("/weight_version")
async def set_weight_version(run_id: str, request: Request, services: Server) -> dict[str, Any]:
    """Announce the weights that the trainer has now, any version; with ``model_path`` the engines load them first."""
    asked = parse(WeightUpdate, await body_of(request))
    tell = _announcing(run_id, asked.weight_version, services)
    told: dict[str, Any] = {"weight_version": asked.weight_version}
    if asked.model_path is None:
        await tell()
        return told
    engines, mode = RunEngines.of(services.buffer.get(run_id).run), asked.mode or "abort"
    done = await services.pauses.update(engines, asked.weight_version, asked.model_path, mode, tell)
    return {**told, "mode": mode, **done}


@router.post("/engines/pause")
async def pause_engines(run_id: str, request: Request, services: Server) -> dict[str, Any]:
    """Pause the run's engines; answered when they are idle. They go on when told to, or after ``limit_s`` seconds."""
    asked = parse(PauseRequest, await body_of(request) or b"{}")
    engines = RunEngines.of(services.buffer.get(run_id).run)
    held = await services.pauses.pause(engines, asked.mode, asked.limit_s)
    return {"mode": held.mode, "limit_s": held.limit_s, "workers": held.urls}


@router.post("/engines/continue")
async def continue_engines(run_id: str, request: Request, services: Server) -> dict[str, Any]:
    """Let paused engines go on, with the weights that the trainer gave them, if it names some."""
    asked = parse(ContinueRequest, await body_of(request) or b"{}")
    version = asked.weight_version
    tell = _announcing(run_id, version, services)
    was_paused = await services.pauses.resume(run_id, version, tell)
    return {"weight_version": version, "was_paused": was_paused}


@router.get("/engines")
async def list_engines(run_id: str, services: Server) -> dict[str, Any]:
    """The workers that the run's engines have now, and the pause that its trainer holds."""
    engines, held = RunEngines.of(services.buffer.get(run_id).run), services.pauses.held(run_id)
    pause = None if held is None else {"mode": held.mode, "limit_s": held.limit_s, "until_s": held.until_s}
    async with admin_client(engines.api_key) as http:
        workers = await asyncio.gather(*map(_worker_view, await weight_updates.workers_of(http, engines.urls)))
    return {"workers": workers, "pause": pause}


async def _worker_view(worker: WorkerAdmin) -> dict[str, Any]:
    info, load = await worker.model_info(), await worker.load()
    return {
        "url": worker.url,
        "weight_version": info.weight_version if info else None,
        "model_path": info.model_path if info else None,
        "num_running": load.running if load else None,
        "num_waiting": load.waiting if load else None,
    }


def _announcing(run_id: str, version: int | None, services: Services) -> Callable[[], Awaitable[None]]:
    """What tells the buffer of the version, once it is time. Raises ``RunNotFound`` at once, ``StorageFailed`` then."""
    buffer = services.buffer.get(run_id).buffer

    async def tell() -> None:
        if version is not None:
            buffer.check_storage()
            announce(buffer, version)
            await buffer.save_run()

    return tell
