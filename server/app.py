"""The composition root: builds one server from its parts."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from urllib.parse import urlsplit

from forebay.core.errors import MissingExtra

try:
    from fastapi import FastAPI
except ModuleNotFoundError:
    raise MissingExtra("fastapi", "server") from None
from starlette.types import ASGIApp

from forebay.buffer.buffer import Buffer
from forebay.buffer.retention import Retention
from forebay.buffer.store.abc import Store
from forebay.buffer.store.journal import JournalStore
from forebay.buffer.store.memory import MemoryStore
from forebay.core.settings import Settings
from forebay.generators.discovery.catalog import Catalog
from forebay.generators.environments.child import PYTHON_VARIABLE
from forebay.server.auth import Guard, RunKeys
from forebay.server.engine_pauses import EnginePauses
from forebay.server.errors import add_error_handlers
from forebay.server.gateway_process import GatewayProcess
from forebay.server.routes import (
    annotations,
    batches,
    bodies,
    exports,
    groups,
    operations,
    read_batches,
    read_parts,
    run_process,
    runs,
    slime_runs,
    weights,
    write_samples,
)
from forebay.server.routes.openapi import complete_document
from forebay.server.routes.sample_routes import SampleRouter
from forebay.server.runs.evaluations import Evaluations
from forebay.server.runs.folders import CodeCopies, RunFolders
from forebay.server.runs.gateway_registration import RunGateway
from forebay.server.runs.input_files import InputFiles
from forebay.server.runs.launches import RunParts
from forebay.server.runs.recorded_groups import RecordedGroups
from forebay.server.runs.records import RunRecords
from forebay.server.runs.replay_sources import ReplaySources
from forebay.server.runs.replay_starts import ReplayStarts
from forebay.server.runs.replays import Replays
from forebay.server.runs.service import RunService
from forebay.server.runs.start_checks import StartCheck
from forebay.server.runs.start_fields import RunDefaults
from forebay.server.runs.supervisor import Supervisor
from forebay.server.search.searches import Searches
from forebay.server.services import Services
from forebay.server.tracing.run_traces import RunTraces
from forebay.server.tracing.trace_upkeep import TraceUpkeep
from forebay.server.ui import history, overview, search
from forebay.server.ui.pages import UiPages
from forebay.telemetry.metrics import Metrics
from forebay.web.bodies import BodyBudget, BodyLimit, BodyMiddleware
from forebay.web.browser_guard import BrowserGuard


def create_app(services: Services) -> ASGIApp:
    """The server as an ASGI app over open services: a guard, then the sample routes, then FastAPI."""
    api = create_api()
    api.state.services = services
    settings = services.settings
    ordinary = BodyMiddleware(api, services.bodies, BodyLimit(settings.max_start_bytes, "max_start_bytes"))
    # Before the body is read. The sample routes even look up their run before that.
    keyed = RunKeys(ordinary, services.buffer)
    paths = write_samples.PATHS | read_batches.PATHS | read_parts.PATHS | annotations.PATHS
    app = SampleRouter(keyed, services, paths)
    if settings.token:  # a page in a browser does not know it
        return Guard(app, settings.token, settings.viewer_token)
    return BrowserGuard(app, own_hosts(settings), is_insecure=settings.insecure)


def own_hosts(settings: Settings) -> list[str]:
    """Host names under which clients may call the server, besides those of its machine."""
    return [settings.host, urlsplit(settings.public_url).hostname or "", *settings.allowed_hosts]


def create_api() -> FastAPI:
    """The FastAPI app with every ordinary route and the OpenAPI document of all routes."""
    # Without services: documents and tests list the routes and open nothing.
    # FastAPI's own doc pages are off: they load scripts from elsewhere, which could then call every route.
    api = FastAPI(title="Forebay", version=version("forebay"), docs_url=None, redoc_url=None)
    api.state.refusals = slime_runs.Refusals()
    api.state.overview = overview.Overview()
    api.state.figures = history.BatchFigures()
    for module in (
        slime_runs,
        runs,
        exports,
        groups,
        bodies,
        read_parts,
        batches,
        annotations,
        weights,
        operations,
        overview,
        history,
        search,
    ):
        api.include_router(module.router)
    api.include_router(run_process.router)
    api.mount("/ui", UiPages(), name="ui")
    add_error_handlers(api)
    complete_document(api)
    return api


@asynccontextmanager
async def open_services(settings: Settings, own_url: str) -> AsyncIterator[Services]:
    """Open all parts in order; on exit, end the run processes first and close the store last.

    Run processes reach the server under ``own_url``, unless ``public_url`` is set. Raises ``StorageFailed``.
    """
    working_dir = Path.cwd()  # read once: relative paths must not move if something changes it later
    async with AsyncExitStack() as stack:
        catalog = await stack.enter_async_context(
            Catalog(settings.generators, working_dir=working_dir, inspect_timeout_s=settings.inspect_timeout_s)
        )
        folders = RunFolders(settings.data_dir, settings.max_log_bytes, settings.max_hook_answer_bytes)
        traces = RunTraces(folders.trace, settings.max_trace_bytes)
        upkeep = await stack.enter_async_context(TraceUpkeep(traces))
        made = Buffer(
            make_store(settings),
            folders.make_hooks,
            remembered_samples=settings.remembered_samples,
            make_trace=traces.of,
        )
        buffer = await stack.enter_async_context(made)
        await upkeep.begin()
        own_url = settings.public_url or own_url
        process = await stack.enter_async_context(GatewayProcess(settings))
        run_gateway = RunGateway(buffer, process, own_url, traces)
        stack.push_async_callback(run_gateway.aclose)
        files = InputFiles(settings, working_dir)
        stack.push_async_callback(files.aclose)
        records = RunRecords(buffer, run_gateway, own_url, traces, files)
        supervisor = await stack.enter_async_context(
            Supervisor(
                records,
                max_restarts=settings.max_restarts,
                stop_grace_s=settings.stop_grace_s,
                max_engine_reply_bytes=settings.max_engine_reply_bytes,
                working_dir=working_dir,
                environment={**files.limits.environment, PYTHON_VARIABLE: settings.environment_python},
                max_log_bytes=settings.max_log_bytes,
                cluster=settings.model_dump(include={"worker_silence_s", "ray_address", "ray_namespace"}),
            )
        )
        sources = ReplaySources(buffer, files, settings.replay or None, settings.max_body_bytes)
        sources.hold_all()  # before retention begins
        run_service = RunService(
            RunParts(
                buffer,
                catalog,
                folders,
                records,
                supervisor,
                StartCheck(settings, files),
                files,
                RunDefaults(settings.run_defaults),
                sources,
                ReplayStarts(buffer, sources, folders, files),
                Replays(buffer, records, sources),
            ),
            start_wait_s=settings.start_wait_s,
        )
        stack.push_async_callback(run_service.aclose)
        run_service.look_for_generators()  # in the background: a slow import must not hold up the start
        recorded = await stack.enter_async_context(RecordedGroups(sources))

        evaluations = await stack.enter_async_context(Evaluations(buffer, run_service))

        def note_ended(run_id: str) -> None:
            sources.release(run_id)
            recorded.note_ended(run_id)
            evaluations.note_ended(run_id)

        records.on_ended = note_ended
        retention = await stack.enter_async_context(
            Retention(buffer, settings.max_journal_bytes, replay_bytes=settings.replay_bytes)
        )
        await stack.enter_async_context(CodeCopies(buffer, folders))
        pauses = await stack.enter_async_context(EnginePauses(settings.data_dir / "pauses", buffer))
        searches = await stack.enter_async_context(Searches())
        yield Services(
            settings=settings,
            buffer=buffer,
            catalog=catalog,
            runs=run_service,
            gateway=run_gateway,
            pauses=pauses,
            traces=traces,
            trace_upkeep=upkeep,
            retention=retention,
            evaluations=evaluations,
            recorded=recorded,
            sources=sources,
            searches=searches,
            metrics=Metrics(lambda: operations.snapshot(buffer, upkeep)),
            bodies=BodyBudget(settings.max_body_bytes, settings.max_bodies_bytes, settings.body_room_wait_s),
        )


def make_store(settings: Settings) -> Store:
    """The store selected by the settings."""
    if settings.store == "memory":
        return MemoryStore()
    return JournalStore(settings.data_dir, segment_bytes=settings.segment_bytes, reserve_bytes=settings.reserve_bytes)
