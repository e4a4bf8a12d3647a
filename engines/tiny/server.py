"""Serve the embedded engine over HTTP until a signal stops it."""

import asyncio
import json
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from forebay.core.addresses import host_patterns
from forebay.engines.fake_sglang.routes import create_app, guarded
from forebay.engines.tiny.engine import DEFAULT_NAME, TinyEngine
from forebay.engines.tiny.extra import require
from forebay.engines.tiny.model import ensure_model, load_model
from forebay.web.connection_limits import DEFAULT_LIMITS, ConnectionLimits
from forebay.web.serving import bind, serve_app, url_of

OnReady = Callable[[str], None]


def announce(url: str) -> None:
    """Write the line that gives a parent process the engine's address: ``{"event": "ready", "url": …}``."""
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
    """Serve a model folder, or the built-in model, until SIGTERM or SIGINT.

    ``port`` 0 picks a free port; ``on_ready`` gets the URL once the engine answers. ``threads`` is the number of cores
    that torch may use, ``max_rows`` the number of choices generated at once. ``allowed_hosts`` are host names to accept
    besides this machine's own; ``insecure`` accepts every name. Raises ``MissingExtra`` without the extra ``local``,
    ``InvalidInput`` for a folder without a model, an unavailable address or an invalid name.
    """
    names = host_patterns(allowed_hosts)
    # Bound before the model is made, so that a port in use is reported at once. Until the server listens, connections
    # are refused instead of left waiting.
    with closing(bind(host, port)) as bound, _exit_on_sigterm(), suppress(KeyboardInterrupt):
        require("transformers").utils.logging.disable_progress_bar()
        model = load_model(model_path or ensure_model(threads=threads))

        async def run() -> None:
            stopping = asyncio.Event()
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, stopping.set)
            async with TinyEngine(model, name=name, threads=threads, max_rows=max_rows) as engine:
                app = guarded(create_app(engine), host=host, allowed_hosts=names, insecure=insecure)
                async with serve_app(app, host=host, port=bound.getsockname()[1], limits=limits):
                    on_ready(url_of(bound))
                    await stopping.wait()
                    # Before the server waits for its connections, which end only when their calls do.
                    engine.thread.abort_all()

        asyncio.run(run())


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Unwind the stack on SIGTERM, so that a half-made model folder is removed."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
