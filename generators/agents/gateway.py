"""What a run process says to the gateway: a rollout begins, a rollout is over, what was recorded of it."""

import asyncio
import logging
import re
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import httpx
import msgspec

from forebay.core.backoff import Backoff
from forebay.core.errors import EngineError, EngineUnavailable, InvalidInput
from forebay.generators.buffer_link.abc import BUSY, GONE, LinkRefused, RunGone, retry_after_s

logger = logging.getLogger(__name__)

MAX_TRIES = 8
"""For one call to a gateway that does not answer: with the pauses, half a minute. The server restarts it in seconds."""


class OpenRollout(msgspec.Struct, frozen=True):
    """A rollout that the gateway records: the addresses to give to its agent, and the key that opens them."""

    rollout_id: str
    base_url: str
    """Chat Completions and Responses, as the ``openai`` package takes it: ends in ``/v1``."""
    anthropic_url: str
    """Messages, as the ``anthropic`` package takes it."""
    key: str


class RolloutRecord(msgspec.Struct, frozen=True):
    """What an agent's calls were. ``samples`` hold the fields of a sample each: forks first, the main one last."""

    samples: list[dict[str, Any]] = []
    counters: dict[str, int] = {}
    num_calls: int = 0
    failures: list[dict[str, Any]] = []
    """Calls that failed, in order: ``kind`` (``engine`` or ``agent``), ``status``, ``message``, and ``call``: how many
    had begun by then."""
    finish_reason: str = ""
    """Of the last turn."""

    @property
    def num_sampled_tokens(self) -> int:
        """By all its calls, as far as the engine told their ids."""
        return sum(sum(sample.get("loss_mask") or ()) for sample in self.samples)


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
        self._server_url = f"{buffer_url.rstrip('/')}/gateway"
        self._http = httpx.AsyncClient(timeout=httpx.Timeout(90.0, connect=10.0))
        self._address: _Address | None = None
        self._asking = asyncio.Lock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def open(
        self,
        rollout_id: str,
        *,
        rid_prefix: str,
        deadline_s: float,
        sampling_params: Mapping[str, Any],
        max_tokens: int | None = None,
    ) -> OpenRollout:
        """Begin a rollout, which ends by itself after ``deadline_s`` seconds.

        ``sampling_params`` are used by calls that leave them out; none generates more than ``max_tokens``.
        """
        body = {
            "rollout_id": rollout_id,
            "rid_prefix": rid_prefix,
            "deadline_s": deadline_s,
            "sampling_params": dict(sampling_params),
            "max_tokens": max_tokens,
        }
        return msgspec.json.decode(await self._ask("POST", "", body), type=OpenRollout)

    async def close(self, rollout_id: str) -> RolloutRecord:
        """End a rollout: its key opens nothing more, its calls in flight are aborted. What was recorded.

        Raises ``EngineError`` if nothing is known of it: the gateway was restarted meanwhile.
        """
        return msgspec.json.decode(await self._ask("POST", f"/{rollout_id}/close", {}), type=RolloutRecord)

    async def look(self, rollout_id: str) -> RolloutRecord:
        """What was recorded so far. Raises ``EngineError`` if nothing is known of it."""
        return msgspec.json.decode(await self._ask("GET", f"/{rollout_id}", None), type=RolloutRecord)

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> bytes:
        pause = Backoff()
        for _ in range(MAX_TRIES):
            address = await self._found()
            response = await self._try(address, method, path, body)
            status = None if response is None else response.status_code
            if status in GONE:
                raise EngineError("the gateway knows nothing of this rollout any more", status_code=404)
            if response is not None and status not in BUSY and status != httpx.codes.UNAUTHORIZED:
                return _content(response)
            if status not in BUSY and self._address is address:
                # It is another one now, or the run is over: the server knows.
                self._address = None
            await pause.wait(retry_after_s(response))
        raise EngineUnavailable("the gateway does not answer", hint="see the server's log")

    async def _try(
        self, address: _Address, method: str, path: str, body: dict[str, Any] | None
    ) -> httpx.Response | None:
        url, headers = f"{address.url}/gateway/rollouts{path}", {"Authorization": f"Bearer {address.key}"}
        try:
            return await self._http.request(method, url, json=body, headers=headers)
        except httpx.TransportError as error:
            logger.warning("the gateway does not answer (%s: %s)", type(error).__name__, error)
            return None

    async def _found(self) -> _Address:
        async with self._asking:
            if self._address is None:
                self._address = await self._ask_server()
            return self._address

    async def _ask_server(self) -> _Address:
        pause = Backoff()
        while True:
            try:
                response = await self._http.post(self._server_url)
            except httpx.TransportError as error:
                logger.warning("the server does not answer (%s: %s)", type(error).__name__, error)
                response = None
            if response is not None and response.status_code in GONE:
                raise RunGone("the run is over")
            if response is not None and response.status_code not in BUSY:
                return msgspec.json.decode(_content(response), type=_Address)
            await pause.wait(retry_after_s(response))


def _content(response: httpx.Response) -> bytes:
    """The body of an answer. No error tells an address: that of the server holds the key of the run."""
    if response.is_error:
        raise LinkRefused(
            f"the gateway cannot be used, the answer is {response.status_code}: {response.text[:300]}",
            hint="server, gateway and generator must be of the same version",
        )
    return response.content
