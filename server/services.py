"""The parts of the server that routes use."""

from dataclasses import dataclass

from starlette.requests import HTTPConnection

from forebay.buffer.buffer import Buffer
from forebay.buffer.retention import Retention
from forebay.core.settings import Settings
from forebay.generators.discovery.catalog import Catalog
from forebay.server.engine_pauses import EnginePauses
from forebay.server.runs.evaluations import Evaluations
from forebay.server.runs.gateway_registration import RunGateway
from forebay.server.runs.recorded_groups import RecordedGroups
from forebay.server.runs.replay_sources import ReplaySources
from forebay.server.runs.service import RunService
from forebay.server.search.searches import Searches
from forebay.server.tracing.run_traces import RunTraces
from forebay.server.tracing.trace_upkeep import TraceUpkeep
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
    traces: RunTraces
    trace_upkeep: TraceUpkeep
    retention: Retention
    evaluations: Evaluations
    recorded: RecordedGroups
    sources: ReplaySources
    searches: Searches
    metrics: Metrics
    bodies: BodyBudget


def services_of(connection: HTTPConnection) -> Services:
    """The services of the app that serves this request; a FastAPI dependency."""
    services: Services = connection.app.state.services
    return services
