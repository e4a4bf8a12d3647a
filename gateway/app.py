"""The gateway's application: routes of the server, of runs and of agents."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from forebay.core.errors import ForebayError
from forebay.gateway.agent_routes import AgentRoutes
from forebay.gateway.control_routes import ControlRoutes
from forebay.gateway.request_bodies import RegisterRun
from forebay.gateway.runs.registry import RunRegistry
from forebay.gateway.spec import GatewaySpec
from forebay.telemetry.tracing.stall_watch import StallWatch
from forebay.web.bodies import BodyBudget
from forebay.web.replies import ClientGone, error_body

logger = logging.getLogger(__name__)


def create_gateway(spec: GatewaySpec) -> Starlette:
    """Return the gateway as an ASGI application; its lifespan ends all runs."""
    watch = StallWatch()
    registry = RunRegistry(spec.control_key, watch)
    bodies = BodyBudget(spec.max_body_bytes, spec.max_bodies_bytes, spec.body_room_wait_s)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        watch.start()
        await asyncio.gather(*(_take_over(registry, *run) for run in spec.runs.items()))
        yield
        await registry.aclose()
        watch.stop()

    return Starlette(
        routes=[*ControlRoutes(spec, registry, bodies).routes(), *AgentRoutes(registry, bodies).routes()],
        lifespan=lifespan,
        exception_handlers={ForebayError: _forebay_error, ClientGone: _client_gone},
    )


async def _take_over(registry: RunRegistry, run_id: str, registration: dict[str, Any]) -> None:
    """Register a run of the previous gateway. A failure must not affect the other runs."""
    try:
        await registry.register(run_id, RegisterRun.model_validate(registration))
    except Exception:  # any error: otherwise each gateway that the server starts would crash
        logger.exception("run %s can no longer use the gateway", run_id)
    else:
        registry.runs[run_id].report_waiting(False)  # the gateway that crashed may have reported True


async def _forebay_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ForebayError)
    return JSONResponse(error_body(error), status_code=error.status)


async def _client_gone(_: Request, _error: Exception) -> Response:
    return Response(status_code=499)
