"""The blocking driver, which runs flows over HTTP, also in the background. It loads no asyncio."""

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import httpx

from forebay.client.calls.cutting import Connections
from forebay.client.calls.flow import Call, Flow, Lost, Pause, ServerReply, Work
from forebay.core.addresses import is_http_url, is_local_url, trusts_nobody
from forebay.core.errors import InvalidInput

T = TypeVar("T")

# Shorter than a call's timeout: a machine that is gone refuses no connection, and a long poll would wait its full time.
CONNECT_TIMEOUT_S = 10.0


class Transport:
    """Calls the server at ``url``, which may have a path, and runs flows, blocking the calling thread.

    ``token`` is sent with each call. Proxies are used only with ``may_ask_proxy``, and never for addresses of this
    machine. Thread-safe. Raises ``InvalidInput`` for an unusable address or token.
    """

    def __init__(self, url: str, token: str | None = None, *, may_ask_proxy: bool = True) -> None:
        self._http = httpx.Client(**http_options(url, token, may_ask_proxy))
        self._connections = Connections()

    def run(self, flow: Flow[T], pause: Callable[[Pause], object] | None = None) -> T:
        """Run ``flow`` and return its result. Raises ``ClientClosed`` when the transport is cut."""
        return drive(flow, self.ask, pause or (lambda effect: self._connections.pause(effect.seconds)))

    def ask(self, call: Call) -> ServerReply | Lost:
        """Make ``call`` once. Raises ``ClientClosed`` when the transport is cut."""
        # Checked before, for calls made after the cut, and after: a cut connection looks like a lost one.
        self._connections.check()
        try:
            reply = self._send(call, trace=self._connections.trace)
        except RuntimeError:  # the connections were closed while a thread was about to send
            self._connections.check()
            raise
        if isinstance(reply, Lost):
            self._connections.check()
        return reply

    def save(self, call: Call, write: Callable[[bytes], object]) -> ServerReply | Lost:
        """Make ``call`` once and stream the body of a success to ``write``; the returned reply then has no body."""
        try:
            with self._http.stream(call.method, call.path, **request_of(call)) as response:
                if not response.is_success:
                    response.read()
                    return reply_of(response)
                for piece in response.iter_bytes():
                    write(piece)
                return ServerReply(response.status_code, response.headers, b"")
        except httpx.RequestError as error:
            return lost_by(error)

    def cut(self) -> None:
        """Interrupt every flow, those of other threads too. Only ``run_last`` works from now on."""
        self._connections.cut()

    def run_last(self, flow: Flow[T]) -> T:
        """Run ``flow`` after ``cut`` and return its result."""
        return drive(flow, self._send, lambda pause: time.sleep(pause.seconds))

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _send(self, call: Call, **extensions: Any) -> ServerReply | Lost:
        try:
            return reply_of(self._http.request(call.method, call.path, extensions=extensions, **request_of(call)))
        except httpx.RequestError as error:
            return lost_by(error)


def drive(flow: Flow[T], ask: Callable[[Call], ServerReply | Lost], pause: Callable[[Pause], object]) -> T:
    """Run ``flow`` with these functions and return its result."""
    answer: Any = None
    try:
        while True:
            effect = flow.send(answer)
            match effect:
                case Call():
                    answer = ask(effect)
                case Pause():
                    answer = pause(effect)
                case Work():
                    answer = effect.function()
    except StopIteration as stop:
        result: T = stop.value
        return result
    finally:
        flow.close()  # after an interrupted call, the flow still has to note which request that was


class Background:
    """Runs a flow in its own thread until the flow ends or is stopped."""

    def __init__(self, transport: Transport, flow: Flow[None], name: str) -> None:
        self._woken = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(transport, flow), name=name, daemon=True)
        self._thread.start()

    def _run(self, transport: Transport, flow: Flow[None]) -> None:
        try:
            transport.run(flow, self._pause)
        except Exception:  # of any kind: a request may be in progress when the connections are closed
            if not self._stopping.is_set():
                raise

    def _pause(self, pause: Pause) -> None:
        # A thread cannot be ended from outside and waits for only one event, so ``stop`` sets both.
        event = self._woken if pause.is_wakeable else self._stopping
        event.wait(pause.seconds)
        self._woken.clear()
        if self._stopping.is_set():
            raise _Stopped

    def wake(self) -> None:
        """End the current wakeable pause, or the next one."""
        self._woken.set()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for the flow's end."""
        self._thread.join(timeout_s)

    def stop(self) -> None:
        """End the flow at its next pause."""
        self._stopping.set()
        self.wake()


class _Stopped(Exception):
    """Raised from a pause to end a background thread."""


def http_options(url: str, token: str | None, may_ask_proxy: bool) -> dict[str, Any]:
    """Arguments of an httpx client. Raises ``InvalidInput`` for an unusable address or token."""
    try:
        is_address = is_http_url(url) and bool(httpx.URL(url))
    except httpx.InvalidURL:  # httpx also checks characters and host names
        is_address = False
    if not is_address:
        hint = "an address looks like http://127.0.0.1:8889"
        raise InvalidInput(f"{url!r} is not a server's address", hint=hint, field="url")
    if token and not (token.isascii() and token.isprintable()):
        hint = "pass the server's own token"
        raise InvalidInput("the token has characters that are not allowed in a header", hint=hint, field="token")
    asks_proxy = may_ask_proxy and not is_local_url(url)
    return {
        "base_url": url.rstrip("/"),
        "headers": {"Authorization": f"Bearer {token}"} if token else {},
        "trust_env": asks_proxy,
        "verify": True if asks_proxy or httpx.URL(url).scheme == "https" else trusts_nobody(),
    }


def request_of(call: Call) -> dict[str, Any]:
    """Arguments of a request for ``call``."""
    return {
        "content": call.body,
        "headers": dict(call.headers),
        "params": call.query,  # None keeps a query in the path; an empty mapping would remove it
        "timeout": httpx.Timeout(call.timeout_s, connect=CONNECT_TIMEOUT_S),
    }


def reply_of(response: httpx.Response) -> ServerReply:
    """The reply, of any status."""
    return ServerReply(response.status_code, response.headers, response.content)


def lost_by(error: httpx.RequestError) -> Lost:
    """The outcome of a request without a reply."""
    return Lost(f"{type(error).__name__}: {error}".rstrip(": "))
