"""The gateway's routes: those of the server, those of the runs, and those of the agents."""

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
from forebay.gateway.runs.registry import Desk
from forebay.gateway.spec import GatewaySpec
from forebay.web.bodies import BodyBudget
from forebay.web.replies import ClientGone, error_body

logger = logging.getLogger(__name__)


def create_gateway(spec: GatewaySpec) -> Starlette:
    """The gateway as an ASGI application; its lifespan ends all runs."""
    desk = Desk()
    bodies = BodyBudget(spec.max_body_bytes, spec.max_bodies_bytes)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await asyncio.gather(*(_take_over(desk, run_id, told) for run_id, told in spec.runs.items()))
        yield
        await desk.aclose()

    return Starlette(
        routes=[*ControlRoutes(spec, desk, bodies).routes(), *AgentRoutes(desk, bodies).routes()],
        lifespan=lifespan,
        exception_handlers={ForebayError: _forebay_error, ClientGone: _client_gone},
    )


async def _take_over(desk: Desk, run_id: str, told: dict[str, Any]) -> None:
    """A run of the gateway before this one. One that fails must not take the others with it."""
    try:
        await desk.register(run_id, RegisterRun.model_validate(told))
    except Exception:  # whatever it is: else the gateway would crash for ever
        logger.exception("run %s cannot use the gateway any more", run_id)
    else:
        desk.runs[run_id].note_waiting(False)  # a gateway that crashed may have said the contrary


async def _forebay_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ForebayError)
    return JSONResponse(error_body(error), status_code=error.status)


async def _client_gone(_: Request, _error: Exception) -> Response:
    return Response(status_code=499)
