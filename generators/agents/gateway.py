"""Calls of a run process to the gateway: opening and closing rollouts, and reading their records."""

import asyncio
import dataclasses
import logging
import re
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any, Self

import msgspec

from forebay.client.calls.async_transport import AsyncTransport
from forebay.client.calls.flow import Call, Lost, ServerReply, json_call
from forebay.core.backoff import Backoff
from forebay.core.binary_sample import SAMPLES_TYPE, split_samples
from forebay.core.errors import EngineError, EngineUnavailable, ForebayError, InvalidInput
from forebay.core.parts import NamedPart
from forebay.generators.buffer_link.abc import BUSY, GONE, TIMEOUT_S, LinkRefused, asked, text_of
from forebay.telemetry.tracing.records import TurnSummary

logger = logging.getLogger(__name__)

UNAUTHORIZED = 401
ROLLOUTS = "gateway/rollouts"
MAX_TRIES = 8
"""Attempts of one call, about half a minute with pauses. The server restarts a failed gateway within seconds."""


class RolloutAccess(msgspec.Struct, frozen=True):
    """A rollout opened at the gateway: the addresses and the key for its agent."""

    rollout_id: str
    base_url: str
    """Base URL of Chat Completions and Responses for the ``openai`` package; ends in ``/v1``."""
    anthropic_url: str
    """Base URL of Messages for the ``anthropic`` package."""
    key: str


class RecordedTrace(msgspec.Struct, frozen=True):
    """Time spent by each of an agent's turns; empty if the run is not traced."""

    turns: list[TurnSummary] = []


class RolloutRecord(msgspec.Struct, frozen=True):
    """Record of an agent's calls. ``samples`` contains the fields of each sample: forks first, the main one last."""

    samples: list[dict[str, Any]] = []
    counters: dict[str, int] = {}
    notes: dict[str, int] = {}
    """Counts by kind of what the samples lack: left out, forwarded without reading, or not recorded."""
    num_calls: int = 0
    failures: list[dict[str, Any]] = []
    """Failed calls in order: ``kind`` (``engine``, ``environment`` or ``agent``), ``status``, ``message``, and
    ``call``, the number of calls begun by then."""
    finish_reason: str = ""
    """Finish reason of the last turn."""
    broken_tokens: int | None = None
    """Tokens sampled by a rollout that reached its token cap; else None."""
    trace: RecordedTrace = RecordedTrace()

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens sampled by all calls whose engine returned token ids."""
        return sum(sum(sample.get("loss_mask") or ()) for sample in self.samples)

    def with_parts(self, parts: Mapping[str, NamedPart]) -> Self:
        """Return the record with the parts themselves in place of their digests."""
        for sample in self.samples:
            if digests := sample.get("parts"):
                sample["parts"] = [parts[digest] for digest in digests]
        return self

    def sample_fields(self) -> list[dict[str, Any]]:
        """Return ``samples``, in place of the recording of the rollout's own client."""
        return self.samples


class _Capped(msgspec.Struct, frozen=True):
    rollouts: list[str]
    last: int


class _Address(msgspec.Struct, frozen=True):
    url: str
    key: str


class GatewayLink:
    """Connection to the gateway of one run. Gets its address from the server at the first call, and after a failure.

    Enter it with ``async with``.
    """

    def __init__(self, buffer_url: str) -> None:
        if not re.search(r"/w/[^/]+/?$", buffer_url):
            raise InvalidInput(
                f"agents need the gateway of a Forebay server (got {buffer_url!r:.200})",
                hint="start the run on a Forebay server, which passes remote_buffer_url to its generators",
                field="remote_buffer_url",
            )
        self._server = AsyncTransport(buffer_url, token=None)
        self._gateway: AsyncTransport | None = None
        self._url = ""
        # One request for all: when the gateway restarts, every rollout loses it at once.
        self._asking = asyncio.Lock()
        self._capped: dict[str, asyncio.Event] = {}
        """For each rollout with a token cap, an event that is set when it reaches the cap."""
        self._num_capped = 0
        self._following: asyncio.Task[None] | None = None
        self._closing = AsyncExitStack()
        self._closing.push_async_callback(self._server.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait([self._following])
        await self._closing.aclose()

    async def url(self) -> str:
        """Return the gateway's address."""
        await self._found()
        return self._url

    async def open(
        self,
        rollout_id: str,
        *,
        rid_prefix: str,
        deadline_s: float,
        sampling_params: Mapping[str, Any],
        max_tokens: int | None = None,
        cap_tokens: int | None = None,
        engine_url: str | None = None,
        traceparent: str = "",
    ) -> RolloutAccess:
        """Open a rollout, which the gateway ends after ``deadline_s`` seconds at the latest.

        ``sampling_params`` are defaults for its calls. ``max_tokens`` limits each call, ``cap_tokens`` all calls
        together. Calls go to ``engine_url`` if that engine is available. Their spans belong to ``traceparent``.
        """
        body = {
            "rollout_id": rollout_id,
            "rid_prefix": rid_prefix,
            "deadline_s": deadline_s,
            "sampling_params": dict(sampling_params),
            "max_tokens": max_tokens,
            "cap_tokens": cap_tokens,
            "engine_url": engine_url,
            **({"traceparent": traceparent} if traceparent else {}),
        }
        return msgspec.json.decode(await self._ask("POST", ROLLOUTS, body), type=RolloutAccess)

    async def close(self, rollout_id: str) -> RolloutRecord:
        """End a rollout and return its record. Its key becomes invalid, and its calls in flight are aborted.

        Raises ``EngineError`` if the gateway does not know it, because the gateway was restarted.
        """
        reply = await self._ask("POST", f"{ROLLOUTS}/{rollout_id}/close", {}, accept=SAMPLES_TYPE)
        *frames, record = split_samples(reply)
        parts = {part.digest: part for part in map(NamedPart.read, frames)}
        return msgspec.json.decode(record, type=RolloutRecord).with_parts(parts)

    async def wait_capped(self, rollout_id: str) -> None:
        """Wait until an open rollout has reached its token cap."""
        capped = self._capped.setdefault(rollout_id, asyncio.Event())
        if self._following is None or self._following.done():
            self._following = asyncio.create_task(self._follow_capped())
        try:
            await capped.wait()
        finally:
            self._capped.pop(rollout_id, None)

    async def _follow_capped(self) -> None:
        # One request for all: otherwise each rollout would occupy a connection while it lasts.
        pause = Backoff()
        while self._capped:
            try:
                reply = await self._ask("GET", f"gateway/broken?after={self._num_capped}", None)
            except ForebayError as error:  # the agents' own calls notice an outage
                logger.warning("the gateway does not report which rollouts reached their token caps: %s", error)
                await pause.wait()
                continue
            reported = msgspec.json.decode(reply, type=_Capped)
            self._num_capped = reported.last
            for name in reported.rollouts:
                if name in self._capped:
                    self._capped[name].set()

    async def look(self, rollout_id: str) -> RolloutRecord:
        """Return the record so far. Raises ``EngineError`` if the gateway does not know the rollout."""
        return msgspec.json.decode(await self._ask("GET", f"{ROLLOUTS}/{rollout_id}", None), type=RolloutRecord)

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None, *, accept: str = "") -> bytes:
        pause, call = Backoff(), json_call(method, path, body, TIMEOUT_S)
        if accept:
            call = dataclasses.replace(call, headers={**call.headers, "Accept": accept})
        for _ in range(MAX_TRIES):
            gateway = await self._found()
            # Without endless retries: the gateway at this address may be gone for good.
            answer = await gateway.ask(call)
            status = None if isinstance(answer, Lost) else answer.status
            if status in GONE:
                raise EngineError("the gateway no longer knows this rollout", status_code=404)
            if isinstance(answer, Lost):
                logger.warning("the gateway does not answer (%s)", answer.reason)
            elif status not in BUSY and status != UNAUTHORIZED:
                return _content(answer)
            if status not in BUSY and self._gateway is gateway:
                # Ask the server for the new gateway, or whether the run is over.
                self._gateway = None
            await pause.wait(answer.retry_after_s)
        raise EngineUnavailable("the gateway does not answer", hint="see the server's log")

    async def _found(self) -> AsyncTransport:
        async with self._asking:
            if self._gateway is None:
                reply = await self._server.run(asked(Call("POST", "gateway", timeout_s=TIMEOUT_S)))
                address = msgspec.json.decode(_content(reply), type=_Address)
                self._url, self._gateway = address.url, AsyncTransport(address.url, address.key)
                # A replaced transport stays open until the end, because other rollouts may still use it.
                self._closing.push_async_callback(self._gateway.close)
            return self._gateway


def _content(reply: ServerReply) -> bytes:
    """Return the body of an answer. Raises ``LinkRefused`` for error statuses."""
    # The error does not name the server's address, which contains the key of the run.
    if reply.status >= 400:
        raise LinkRefused(
            f"the gateway returned {reply.status}: {text_of(reply)}",
            hint="server, gateway and generator must have the same version",
        )
    return reply.body
