"""What a run process says to the gateway: a rollout begins, a rollout is over, what was recorded of it."""

import asyncio
import logging
import re
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any, Self

import msgspec

from forebay.client.calls.flow import Call, Lost, ServerReply, json_call
from forebay.client.calls.transport import AsyncTransport
from forebay.core.backoff import Backoff
from forebay.core.errors import EngineError, EngineUnavailable, ForebayError, InvalidInput
from forebay.generators.buffer_link.abc import BUSY, GONE, TIMEOUT_S, LinkRefused, asked, text_of
from forebay.telemetry.tracing.records import TurnSummary

logger = logging.getLogger(__name__)

UNAUTHORIZED = 401
ROLLOUTS = "gateway/rollouts"
MAX_TRIES = 8
"""For one call to a gateway that does not answer: with the pauses, half a minute. The server restarts it in seconds."""


class RolloutAccess(msgspec.Struct, frozen=True):
    """A rollout that the gateway records: the addresses to give to its agent, and the key that opens them."""

    rollout_id: str
    base_url: str
    """Chat Completions and Responses, as the ``openai`` package takes it: ends in ``/v1``."""
    anthropic_url: str
    """Messages, as the ``anthropic`` package takes it."""
    key: str


class RecordedTrace(msgspec.Struct, frozen=True):
    """Where the time of an agent's turns went; empty where nothing is traced."""

    turns: list[TurnSummary] = []


class RolloutRecord(msgspec.Struct, frozen=True):
    """What an agent's calls were. ``samples`` hold the fields of a sample each: forks first, the main one last."""

    samples: list[dict[str, Any]] = []
    counters: dict[str, int] = {}
    notes: dict[str, int] = {}
    """What the calls had that the samples do not hold, by kind: left out, passed on unread, or not recorded."""
    num_calls: int = 0
    failures: list[dict[str, Any]] = []
    """Calls that failed, in order: ``kind`` (``engine``, ``environment`` or ``agent``), ``status``, ``message``, and
    ``call``: how many had begun by then."""
    finish_reason: str = ""
    """Of the last turn."""
    broken_tokens: int | None = None
    """Of a rollout that came to its cap: what it had sampled by then."""
    trace: RecordedTrace = RecordedTrace()

    @property
    def num_sampled_tokens(self) -> int:
        """By all its calls, as far as the engine told their ids."""
        return sum(sum(sample.get("loss_mask") or ()) for sample in self.samples)

    def sample_fields(self) -> list[dict[str, Any]]:
        """In place of what the rollout's own client would have recorded."""
        return self.samples


class _Capped(msgspec.Struct, frozen=True):
    rollouts: list[str]
    last: int


class _Address(msgspec.Struct, frozen=True):
    url: str
    key: str


class GatewayLink:
    """The gateway of one run. Its address is asked of the server at the first call, and again when it is gone.

    Enter it with ``async with``.
    """

    def __init__(self, buffer_url: str) -> None:
        if not re.search(r"/w/[^/]+/?$", buffer_url):
            raise InvalidInput(
                f"agents need the gateway of a Forebay server, and {buffer_url!r:.200} is none",
                hint="start the run on a Forebay server: it tells its generators their remote_buffer_url",
                field="remote_buffer_url",
            )
        self._server = AsyncTransport(buffer_url, token=None)
        self._gateway: AsyncTransport | None = None
        self._url = ""
        # One asks for all: when the gateway is restarted, every rollout finds it gone at once.
        self._asking = asyncio.Lock()
        self._capped: dict[str, asyncio.Event] = {}
        """Of rollouts with a cap, whether they have come to it."""
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
        """Its address."""
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
        """Begin a rollout, which ends by itself after ``deadline_s`` seconds.

        ``sampling_params`` are used by calls that leave them out; none generates more than ``max_tokens``, nor
        all of them more than ``cap_tokens``. They go to ``engine_url`` if that can take them. Their spans are those of
        ``traceparent``.
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
        """End a rollout: its key opens nothing more, its calls in flight are aborted. What was recorded.

        Raises ``EngineError`` if nothing is known of it: the gateway was restarted meanwhile.
        """
        return msgspec.json.decode(await self._ask("POST", f"{ROLLOUTS}/{rollout_id}/close", {}), type=RolloutRecord)

    async def wait_capped(self, rollout_id: str) -> None:
        """Return once an open rollout has come to its cap."""
        capped = self._capped.setdefault(rollout_id, asyncio.Event())
        if self._following is None or self._following.done():
            self._following = asyncio.create_task(self._follow_capped())
        try:
            await capped.wait()
        finally:
            self._capped.pop(rollout_id, None)

    async def _follow_capped(self) -> None:
        # One asks for all: each rollout asking for itself would take a connection as long as it lasts.
        pause = Backoff()
        while self._capped:
            try:
                reply = await self._ask("GET", f"gateway/broken?after={self._num_capped}", None)
            except ForebayError as error:  # its agents find it gone by themselves
                logger.warning("the gateway does not tell which rollouts have come to their caps: %s", error)
                await pause.wait()
                continue
            reported = msgspec.json.decode(reply, type=_Capped)
            self._num_capped = reported.last
            for name in reported.rollouts:
                if name in self._capped:
                    self._capped[name].set()

    async def look(self, rollout_id: str) -> RolloutRecord:
        """What was recorded so far. Raises ``EngineError`` if nothing is known of it."""
        return msgspec.json.decode(await self._ask("GET", f"{ROLLOUTS}/{rollout_id}", None), type=RolloutRecord)

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> bytes:
        pause, call = Backoff(), json_call(method, path, body, TIMEOUT_S)
        for _ in range(MAX_TRIES):
            gateway = await self._found()
            # Once, not again without end: the address may be that of a gateway which is gone for good.
            answer = await gateway.ask(call)
            status = None if isinstance(answer, Lost) else answer.status
            if status in GONE:
                raise EngineError("the gateway knows nothing of this rollout any more", status_code=404)
            if isinstance(answer, Lost):
                logger.warning("the gateway does not answer (%s)", answer.reason)
            elif status not in BUSY and status != UNAUTHORIZED:
                return _content(answer)
            if status not in BUSY and self._gateway is gateway:
                # It is another one now, or the run is over: the server knows.
                self._gateway = None
            await pause.wait(answer.retry_after_s)
        raise EngineUnavailable("the gateway does not answer", hint="see the server's log")

    async def _found(self) -> AsyncTransport:
        async with self._asking:
            if self._gateway is None:
                reply = await self._server.run(asked(Call("POST", "gateway", timeout_s=TIMEOUT_S)))
                address = msgspec.json.decode(_content(reply), type=_Address)
                self._url, self._gateway = address.url, AsyncTransport(address.url, address.key)
                # One that is replaced stays open until the end: other rollouts may be about to ask over it.
                self._closing.push_async_callback(self._gateway.close)
            return self._gateway


def _content(reply: ServerReply) -> bytes:
    """The body of an answer."""
    # The error names no address: that of the server holds the key of the run.
    if reply.status >= 400:
        raise LinkRefused(
            f"the gateway cannot be used, the answer is {reply.status}: {text_of(reply)}",
            hint="server, gateway and generator must be of the same version",
        )
    return reply.body
