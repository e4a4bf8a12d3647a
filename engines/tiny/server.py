"""Serving the embedded engine over HTTP until a signal says stop."""

import json
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path

import uvicorn

from forebay.core.addresses import host_patterns
from forebay.core.errors import InvalidInput
from forebay.engines.fake_sglang.routes import create_app, guarded
from forebay.engines.tiny.engine import DEFAULT_NAME, TinyEngine
from forebay.engines.tiny.extra import require
from forebay.engines.tiny.generation_thread import GenerationThread
from forebay.engines.tiny.model import ensure_model, load_model
from forebay.web.connection_limits import DEFAULT_LIMITS, ConnectionLimits
from forebay.web.http_protocol import http_protocol

SHUTDOWN_TIMEOUT_S = 5
"""What is left to clients to take their last bytes once their calls have ended."""

MAX_PORT = 65_535

OnReady = Callable[[str], None]


def announce(url: str) -> None:
    """Write the one line that tells a parent process where the engine is: ``{"event": "ready", "url": …}``."""
    sys.stdout.write(json.dumps({"event": "ready", "url": url}) + "\n")
    sys.stdout.flush()


def serve(
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    model_path: Path | None = None,
    threads: int = 1,
    max_rows: int = 64,
    name: str = DEFAULT_NAME,
    allowed_hosts: str | Sequence[str] = (),
    insecure: bool = False,
    limits: ConnectionLimits = DEFAULT_LIMITS,
    on_ready: OnReady = announce,
) -> None:
    """Serve a model folder, or the built-in model, until SIGTERM (exits with 0) or SIGINT (returns).

    ``port`` 0 takes a free one; ``on_ready`` gets the URL once it answers. ``threads`` are the cores that torch may
    use, ``max_rows`` the choices generated at once. ``allowed_hosts`` are names by which the engine may be called
    besides this machine's own; with ``insecure`` every name will do. Raises ``MissingExtra`` without the extra
    ``local``, ``InvalidInput`` for a folder that holds no model, for an address that cannot be had and for what is no
    name.
    """
    names = host_patterns(allowed_hosts)
    with _bound(host, port) as listener, _exit_on_sigterm(), suppress(KeyboardInterrupt):
        # The address is bound before the model is made: a port that is taken is found out at once.
        require("transformers").utils.logging.disable_progress_bar()
        model = load_model(model_path or ensure_model(threads=threads))
        engine = TinyEngine(model, name=name, threads=threads, max_rows=max_rows)

        @asynccontextmanager
        async def lifespan(_: object) -> AsyncIterator[None]:
            async with engine:
                yield

        config = uvicorn.Config(
            guarded(create_app(engine, lifespan=lifespan), host=host, allowed_hosts=names, insecure=insecure),
            log_config=None,
            access_log=False,
            http=http_protocol(limits),
            ws="none",
            lifespan="on",
            timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S,
        )
        _Server(config, engine.thread, lambda: on_ready(_url(listener))).run(sockets=[listener])


class _Server(uvicorn.Server):
    """Says when it answers, and ends the calls before it waits for their connections."""

    def __init__(self, config: uvicorn.Config, thread: GenerationThread, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._generation = thread
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Before uvicorn waits for its connections: they would only end when their answers do.
        self._generation.abort_all()
        await super().shutdown(sockets=sockets)


@contextmanager
def _bound(host: str, port: int) -> Iterator[socket.socket]:
    """A bound socket that does not listen yet: until the model is there, connections are refused, not left waiting."""
    if not 0 <= port <= MAX_PORT:
        raise InvalidInput(f"{port} is no port", hint=f"0 for a free one, or up to {MAX_PORT}", field="port")
    with ExitStack() as stack:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            listener = stack.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except (OSError, UnicodeError) as error:  # UnicodeError: a host that no name can be
            raise _refusal(host, port, error) from None
        yield listener


def _refusal(host: str, port: int, error: Exception) -> InvalidInput:
    reason = getattr(error, "strerror", None) or error
    return InvalidInput(
        f"port {port} of {host} cannot be used: {reason}",
        hint="is the host an address of this machine, and no other engine running? Port 0 takes a free one",
        field="port",
    )


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """SIGTERM unwinds the stack, so that a half-made model folder goes. uvicorn hands it on after its own shutdown."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 -- translated away, not bound
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"
