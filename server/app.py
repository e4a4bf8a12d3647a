"""The composition root: one server out of its parts."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.metadata import version
from pathlib import Path

from fastapi import FastAPI
from starlette.types import ASGIApp

from forebay.buffer.buffer import Buffer
from forebay.buffer.retention import Retention
from forebay.buffer.store.abc import Store
from forebay.buffer.store.journal import JournalStore
from forebay.buffer.store.memory import MemoryStore
from forebay.core.settings import Settings
from forebay.generators.discovery.catalog import Catalog
from forebay.server.auth import Guard
from forebay.server.engine_pause_records import PauseMarks
from forebay.server.engine_pauses import EnginePauses
from forebay.server.errors import add_error_handlers
from forebay.server.gateway_process import GatewayProcess
from forebay.server.routes import (
    batches,
    groups,
    operations,
    read_batches,
    run_process,
    runs,
    slime_runs,
    weights,
    write_samples,
)
from forebay.server.routes.openapi import add_sample_routes
from forebay.server.routes.sample_routes import SampleRouter
from forebay.server.runs.folders import RunFolders
from forebay.server.runs.gateway_registration import RunGateway
from forebay.server.runs.input_contents import InputContents
from forebay.server.runs.launches import RunParts
from forebay.server.runs.records import RunRecords
from forebay.server.runs.run_defaults import RunDefaults
from forebay.server.runs.service import RunService
from forebay.server.runs.start_checks import InputCheck
from forebay.server.runs.supervisor import Supervisor
from forebay.server.services import Services
from forebay.telemetry.metrics import Metrics
from forebay.web.bodies import BodyBudget


def create_app(services: Services) -> ASGIApp:
    """The server as an ASGI app over open services: a guard, then the routes of samples, then the framework's."""
    api = create_api()
    api.state.services = services
    app = SampleRouter(api, services, write_samples.PATHS | read_batches.PATHS)
    return Guard(app, services.settings.token) if services.settings.token else app


def create_api() -> FastAPI:
    """Every ordinary route, and a document of all."""
    # Without services: documents and tests ask which routes there are, and open nothing.
    api = FastAPI(title="Forebay", version=version("forebay"))
    api.state.refusals = slime_runs.Refusals()
    for module in (slime_runs, runs, groups, batches, run_process, weights, operations):
        api.include_router(module.router)
    add_error_handlers(api)
    add_sample_routes(api)
    return api


@asynccontextmanager
async def open_services(settings: Settings, own_url: str) -> AsyncIterator[Services]:
    """Open everything in order; on the way out, end run processes first and the store last.

    Run processes reach the server under ``own_url``, unless ``public_url`` is set. Raises ``StorageFailed``.
    """
    working_dir = Path.cwd()  # once: what is relative must not move if something changes it later
    async with AsyncExitStack() as stack:
        catalog = await stack.enter_async_context(
            Catalog(settings.generators, working_dir=working_dir, inspect_timeout_s=settings.inspect_timeout_s)
        )
        folders = RunFolders(settings.data_dir)
        buffer = await stack.enter_async_context(Buffer(make_store(settings), folders.make_hooks))
        own_url = settings.public_url or own_url
        process = await stack.enter_async_context(GatewayProcess(settings))
        run_gateway = RunGateway(buffer, process, own_url)
        stack.push_async_callback(run_gateway.aclose)
        records = RunRecords(buffer, run_gateway, own_url)
        supervisor = await stack.enter_async_context(
            Supervisor(
                records,
                max_restarts=settings.max_restarts,
                stop_grace_s=settings.stop_grace_s,
                working_dir=working_dir,
            )
        )
        check = InputCheck(settings, working_dir)
        contents = InputContents(check)
        stack.push_async_callback(contents.aclose)
        run_service = RunService(
            RunParts(
                buffer, catalog, folders, records, supervisor, check, contents, RunDefaults(settings.run_defaults)
            ),
            start_wait_s=settings.start_wait_s,
        )
        stack.push_async_callback(run_service.aclose)
        run_service.look_for_generators()  # in the background: a slow import must not hold up the start
        retention = await stack.enter_async_context(Retention(buffer, settings.max_journal_bytes))
        pauses = await stack.enter_async_context(EnginePauses(settings.data_dir / "pauses", PauseMarks(buffer)))
        yield Services(
            settings=settings,
            buffer=buffer,
            catalog=catalog,
            runs=run_service,
            gateway=run_gateway,
            pauses=pauses,
            retention=retention,
            metrics=Metrics(lambda: operations.snapshot(buffer)),
            bodies=BodyBudget(settings.max_body_bytes, settings.max_bodies_bytes),
        )


def make_store(settings: Settings) -> Store:
    """The store that the settings name."""
    if settings.store == "memory":
        return MemoryStore()
    return JournalStore(settings.data_dir, segment_bytes=settings.segment_bytes)
