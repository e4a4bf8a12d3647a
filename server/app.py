"""The composition root: one server out of its parts."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.metadata import version
from pathlib import Path

from fastapi import FastAPI
from starlette.types import ASGIApp

from forebay.buffer.buffer import Buffer
from forebay.buffer.store.abc import Store
from forebay.buffer.store.journal import JournalStore
from forebay.buffer.store.memory import MemoryStore
from forebay.core.settings import Settings
from forebay.generators.discovery import Catalog
from forebay.server.asgi import BodyBudget
from forebay.server.errors import add_error_handlers
from forebay.server.guard import Guard
from forebay.server.hot import HotRoutes
from forebay.server.openapi import add_hot_routes
from forebay.server.routes import generators, groups, operations, run_process, runs, slime
from forebay.server.runs import RunService
from forebay.server.services import Services
from forebay.server.supervisor import Supervisor
from forebay.telemetry.metrics import Metrics


def create_app(services: Services) -> ASGIApp:
    """The server as an ASGI app over open services: hot routes in front, the framework behind, a guard before both."""
    api = create_api()
    api.state.services = services
    hot = HotRoutes(api, services)
    return Guard(hot, services.settings.token) if services.settings.token else hot


def create_api() -> FastAPI:
    """Every ordinary route, and a document of all."""
    api = FastAPI(title="Forebay", version=version("forebay"))
    api.state.refusals = slime.Refusals()
    for module in (slime, runs, groups, generators, run_process, operations):
        api.include_router(module.router)
    add_error_handlers(api)
    add_hot_routes(api)
    return api


@asynccontextmanager
async def open_services(settings: Settings, own_url: str) -> AsyncIterator[Services]:
    """Open everything in order; on the way out, end run processes first and the store last.

    Run processes reach the server under ``own_url``, unless ``public_url`` is set. Raises ``StorageFailed``.
    """
    working_dir = Path.cwd()
    async with AsyncExitStack() as stack:
        catalog = await stack.enter_async_context(
            Catalog(settings.generators, working_dir=working_dir, inspect_timeout_s=settings.inspect_timeout_s)
        )
        run_service = RunService(settings, catalog, working_dir)
        buffer = await stack.enter_async_context(Buffer(make_store(settings), run_service.make_hooks))
        stack.push_async_callback(run_service.aclose)
        supervisor = await stack.enter_async_context(
            Supervisor(
                run_service,
                max_restarts=settings.max_restarts,
                stop_grace_s=settings.stop_grace_s,
                working_dir=working_dir,
            )
        )
        run_service.connect(buffer, supervisor, own_url)
        run_service.look_for_generators()
        yield Services(
            settings=settings,
            buffer=buffer,
            catalog=catalog,
            runs=run_service,
            metrics=Metrics(lambda: operations.snapshot(buffer)),
            bodies=BodyBudget(settings.max_body_bytes, settings.max_bodies_bytes),
        )


def make_store(settings: Settings) -> Store:
    """The store that the settings name."""
    if settings.store == "memory":
        return MemoryStore()
    return JournalStore(settings.data_dir, segment_bytes=settings.segment_bytes)
