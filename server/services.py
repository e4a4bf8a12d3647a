"""What the routes work with."""

from dataclasses import dataclass

from starlette.requests import HTTPConnection, Request

from forebay.buffer.buffer import Buffer
from forebay.buffer.retention import Retention
from forebay.core.settings import Settings
from forebay.generators.discovery.catalog import Catalog
from forebay.server.engine_pauses import EnginePauses
from forebay.server.runs.gateway_registration import RunGateway
from forebay.server.runs.service import RunService
from forebay.telemetry.metrics import Metrics
from forebay.web.bodies import BodyBudget


@dataclass(frozen=True, slots=True)
class Services:
    """The parts of a running server, opened before the server listens."""

    settings: Settings
    buffer: Buffer
    catalog: Catalog
    runs: RunService
    gateway: RunGateway
    pauses: EnginePauses
    retention: Retention
    metrics: Metrics
    bodies: BodyBudget


def services_of(connection: HTTPConnection) -> Services:
    """The services of the app that serves this request; a FastAPI dependency."""
    services: Services = connection.app.state.services
    return services


async def body_of(request: Request) -> bytes:
    """The body of a request on an ordinary route, within the limits for bodies. Raises ``BodyTooLarge``."""
    body = await services_of(request).bodies.read(request.scope, request.receive)
    body.free()  # what the framework's routes take is small: it is not counted while they work
    return body.data
