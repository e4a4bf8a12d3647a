"""The gateway process, managed by the server: started when first needed, kept running, and given its runs."""

import asyncio
import logging
import secrets
import signal
import socket
import time
from contextlib import suppress
from typing import Any, Self

from forebay.core.addresses import trusts_nobody
from forebay.core.backoff import Backoff
from forebay.core.errors import ForebayError
from forebay.core.processes.child_link import ChildLink
from forebay.core.settings import Settings
from forebay.gateway.spec import GatewaySpec
from forebay.web.connection_limits import ConnectionLimits
from forebay.web.serving import bind, url_of

logger = logging.getLogger(__name__)

START_S = 30.0
STOP_S = 1.5
RESTART_FIRST_S, RESTART_MAX_S = 0.2, 10.0
CALM_S = 60.0
"""After this many seconds of uptime, the restart pause is the shortest again."""
BACKLOG = 2048

Registration = dict[str, Any]
"""The body of ``PUT /gateway/runs/{run_id}``."""


class GatewayUnavailable(ForebayError):
    """The gateway process does not answer."""

    code = "gateway_unavailable"
    status = 503


class GatewayProcess:
    """Manages the gateway. Enter it with ``async with``; the first ``register`` starts the process.

    The server binds the socket and keeps it. If the gateway crashes, another process starts at the same address and is
    given all registrations; connections made in between wait.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._control_key = secrets.token_urlsafe(24)
        self._registered: dict[str, Registration] = {}
        self._calling = asyncio.Lock()
        """The gateway gets one change at a time, so that it always has what is registered here."""
        self._bound: socket.socket | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._process: ChildLink[None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._keeper is not None:  # the process ends with it
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
        if self._bound is not None:
            self._bound.close()

    @property
    def pid(self) -> int | None:
        """Id of the gateway process; None if none is running."""
        return self._process.pid if self._process is not None else None

    def start(self) -> str:
        """Start the gateway unless it runs, and return its URL. Raises ``InvalidInput`` if its port cannot be used."""
        if self._bound is None:
            host = self._settings.gateway_host or self._settings.host
            self._bound = bind(host, self._settings.gateway_port, setting="gateway_port")
            # Not in the gateway: while none runs, connections wait in the kernel instead of being refused.
            self._bound.listen(BACKLOG)
            self._keeper = asyncio.create_task(self._keep_running(self._bound), name="gateway")
            logger.info("the gateway listens on %s", self._url(self._bound))
        return self._url(self._bound)

    async def register(self, run_id: str, registration: Registration) -> None:
        """Make a run known to the gateway. Raises ``GatewayUnavailable``, ``InvalidInput``."""
        self.start()
        async with self._calling:
            if self._registered.get(run_id) == registration:
                return
            self._registered[run_id] = registration  # first: a gateway that starts meanwhile gets it too
            try:
                await self._call("PUT", run_id, registration)
            except BaseException:  # even if the caller was cancelled: the next one must try again
                del self._registered[run_id]
                raise

    async def forget(self, run_id: str) -> None:
        """Have the gateway end a run; a run that was not registered is ignored."""
        async with self._calling:
            if self._registered.pop(run_id, None) is not None:
                with suppress(GatewayUnavailable):  # the next one will not know the run
                    await self._call("DELETE", run_id)

    def _url(self, bound: socket.socket) -> str:
        return self._settings.gateway_url.rstrip("/") or url_of(bound)

    async def _call(self, method: str, run_id: str, body: Registration | None = None) -> None:
        import httpx  # a server without a gateway does not need it

        assert self._bound is not None
        headers = {"Authorization": f"Bearer {self._control_key}"}
        try:
            # One client per call: calls are few, and the next one may reach another process.
            async with httpx.AsyncClient(timeout=START_S, trust_env=False, verify=trusts_nobody()) as http:
                url = f"{url_of(self._bound)}/gateway/runs/{run_id}"
                reply = await http.request(method, url, json=body, headers=headers)
        except httpx.TransportError as error:
            raise GatewayUnavailable(f"the gateway does not answer: {error!r}", hint="see the server's log") from error
        if reply.is_error:
            raise GatewayUnavailable(f"the gateway answers {reply.status_code}: {reply.text[:300]}")

    # --- the process

    async def _keep_running(self, bound: socket.socket) -> None:
        pauses = Backoff(RESTART_FIRST_S, RESTART_MAX_S, is_exact=True)
        while True:
            began_s = time.monotonic()
            try:
                code: int | OSError = await self._run_once(bound)
            except OSError as error:  # no process can be started at the moment
                code = error
            if time.monotonic() - began_s > CALM_S:
                pauses.reset()
            pause_s = pauses.next_s()
            logger.error("the gateway ended (exit code or error: %s); another one starts in %.1f s", code, pause_s)
            await asyncio.sleep(pause_s)

    async def _run_once(self, bound: socket.socket) -> int:
        process = self._process = await self._start_process(bound)
        try:
            return await process.ended()
        finally:
            process.signal(signal.SIGTERM)
            await process.end(STOP_S)
            self._process = None

    async def _start_process(self, bound: socket.socket) -> ChildLink[None]:
        spec = GatewaySpec(
            control_key=self._control_key,
            url=self._url(bound),
            max_body_bytes=self._settings.max_body_bytes,
            max_bodies_bytes=self._settings.max_bodies_bytes,
            max_engine_reply_bytes=self._settings.max_engine_reply_bytes,
            body_room_wait_s=self._settings.body_room_wait_s,
            connections=ConnectionLimits.of(self._settings),
            log_level=self._settings.log_level,
            log_format=self._settings.log_format,
            runs=self._registered,
        )
        descriptor = bound.fileno()
        return await ChildLink.start(
            "forebay.gateway", str(descriptor), setup=spec, reads=type(None), pass_fds=[descriptor]
        )
