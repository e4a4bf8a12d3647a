"""The server's process: its socket, its memory and file limits, and its life from start to shutdown."""

import asyncio
import ctypes
import gc
import logging
import math
import resource
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Self

import uvicorn
import uvloop

from forebay.core.child_process import adopt_orphans, close_to_others, dead_children, reap
from forebay.core.errors import InvalidInput
from forebay.core.settings import Settings
from forebay.core.tasks import TaskSet
from forebay.server.app import create_app, open_services
from forebay.server.hard_stop import HardStop
from forebay.server.services import Services
from forebay.web.connection_limits import ConnectionLimits
from forebay.web.http_protocol import BoundedProtocol, http_protocol
from forebay.web.serving import bind, url_of

logger = logging.getLogger(__name__)

KEPT_BYTES = 256 << 20
LARGEST_POOLED_BYTES = 4 << 20
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
DRAIN_S = 6
"""Time limit for replies under way when the server ends; `ConnectionSweep.end` breaks them off before that."""
REAP_EVERY_S = 3.0
MAX_OPEN_FILES = 65_536
"""Enough for all engine calls and readers; not more, because some programs loop over every possible descriptor."""


def listen(settings: Settings) -> socket.socket:
    """Bind the address of ``settings``. Raises ``InvalidInput`` if it is open to other machines without a token."""
    if not (settings.is_loopback or settings.token or settings.insecure):
        raise InvalidInput(
            f"listening on {settings.host} without a token would let any client write, read and start code",
            hint="set FOREBAY_TOKEN, or pass --insecure on a network that you trust",
            field="host",
        )
    if settings.viewer_token and settings.token in ("", settings.viewer_token):
        raise InvalidInput(
            "viewer_token needs a token beside it, and must differ from it: without a token every client may read",
            hint="set FOREBAY_TOKEN as well",
            field="viewer_token",
        )
    return bind(settings.host, settings.port)


def serve(settings: Settings, bound: socket.socket, when_ready: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM: end long polls, finish requests, end run processes, store everything.

    Returns after SIGTERM; raises ``KeyboardInterrupt`` after SIGINT, ``StorageFailed`` if the data cannot be opened.
    """
    if settings.token:  # otherwise nothing is secret: any process on this machine may call
        close_to_others()
    keep_freed_memory()
    allow_many_files()
    with (
        HardStop(settings.stop_limit_s) as hard_stop,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(_serve(settings, bound, when_ready, hard_stop))


async def _serve(
    settings: Settings, bound: socket.socket, when_ready: Callable[[str], None], hard_stop: HardStop
) -> None:
    url = url_of(bound)
    async with ChildReaper(), open_services(settings, url) as services:
        config = uvicorn.Config(
            create_app(services),
            log_config=None,
            access_log=False,
            http=http_protocol(ConnectionLimits.of(settings)),
            ws="none",  # no route needs it, and uvicorn would look for a library when it starts
            lifespan="off",
            server_header=False,  # these two would be made for each reply, and no client reads them
            date_header=False,
            proxy_headers=False,  # no route uses the client's address
            timeout_keep_alive=math.ceil(settings.idle_timeout_s),
            timeout_graceful_shutdown=DRAIN_S,
        )
        await _Server(config, services, lambda: when_ready(url), hard_stop).serve(sockets=[bound])
    logger.info("all run processes have ended and everything is stored")


def keep_freed_memory() -> None:
    """Keep up to ``KEPT_BYTES`` of a reply's freed memory for the next one, in one pool for all threads.

    glibc would return it to the kernel, which clears each page again: that takes longer than reading the bodies from
    the page cache. Does nothing with another C library. Call it before threads start.
    """
    with suppress(OSError, AttributeError):  # no C library to ask, or one without this call
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, LARGEST_POOLED_BYTES)
        mallopt(_M_ARENA_MAX, 1)


def allow_many_files() -> None:
    """Raise the limit on open files towards ``MAX_OPEN_FILES``; child processes started later inherit it.

    Many systems default to 1 024, for programs that use ``select``. A run with a thousand engine calls in flight needs
    more, and a process may raise its own limit up to the hard limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(MAX_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def calm_collector() -> None:
    """Make the cyclic collector run rarely: by default it scans the whole backlog over and over.

    Samples and groups form no cycles; measured on 4 KB writes, this saves a sixth of the server's CPU.
    """
    gc.freeze()
    gc.set_threshold(100_000, 50, 1_000)


class ChildReaper:
    """Adopts and reaps orphans: processes whose parent, below the server, was killed.

    A parent that starts a process ends the rest of its session (``end_session``). A process that started its own
    session continues. Enter it with ``async with``.
    """

    def __init__(self) -> None:
        self._tasks = TaskSet()

    async def __aenter__(self) -> Self:
        adopt_orphans()
        self._tasks.start(self._keep_reaping())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tasks.cancel()

    async def _keep_reaping(self) -> None:
        before: set[int] = set()
        while True:
            await asyncio.sleep(REAP_EVERY_S)
            dead = await asyncio.to_thread(dead_children)
            # By the second look the event loop has reaped its own children: these are orphans.
            for pid in dead & before:
                reap(pid)
                logger.debug("orphaned process %d has ended", pid)
            before = dead


class _Server(uvicorn.Server):
    """Starts runs once it listens, and ends long polls before it waits for requests to end."""

    def __init__(
        self, config: uvicorn.Config, services: Services, when_ready: Callable[[], None], hard_stop: HardStop
    ) -> None:
        super().__init__(config)
        self._hard_stop = hard_stop
        self._services = services
        self._when_ready = when_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        # Only now: run processes write to the server as soon as they start.
        await self._services.runs.resume_all()
        calm_collector()
        self._when_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # In parallel with the requests: one after the other would exceed the server's time limit.
        stopping = asyncio.create_task(self._services.runs.end_processes())
        # Before uvicorn waits for requests to end: a long poll would use up its time limit.
        self._services.buffer.end_waits()
        protocol = self.config.http_protocol_class
        if issubclass(protocol, BoundedProtocol):  # otherwise stalled replies are waited for, up to ``DRAIN_S``
            protocol.sweep.end(asyncio.get_running_loop())
        await super().shutdown(sockets)
        await stopping

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Ends normally after SIGTERM, where uvicorn would raise the signal again."""
        self._hard_stop.begin(0 if sig == signal.SIGTERM else 128 + sig)
        if sig == signal.SIGTERM:
            self.should_exit = True
        else:
            super().handle_exit(sig, frame)
