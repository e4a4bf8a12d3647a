"""How a recorded engine answers a request: from its file, from its simulated administration, or with a miss."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from forebay.core.errors import InvalidInput
from forebay.engines.fake_sglang.administration import Administration
from forebay.engines.fake_sglang.routes import app_of
from forebay.replay.call_request import (
    ADMINISTRATION,
    HEALTH,
    LOADS,
    MODELLED,
    VERSIONED,
    WORKERS,
    CallRequest,
)
from forebay.replay.engine.cassette import AllGiven, Cassette
from forebay.replay.engine.engine_recorder import UpstreamRecording
from forebay.replay.engine.relay import STREAM
from forebay.replay.engine.replayed_state import AnswerInFlight, ReplayedState
from forebay.replay.engine.served_engine import break_off, send_error
from forebay.replay.errors import RecordingDamaged
from forebay.replay.recorded_calls import CallReply
from forebay.web.http_protocol import ReplyHandle
from forebay.web.replies import JSON_HEADER, ClientGone, encode, send_json

logger = logging.getLogger(__name__)

MISS_STATUS = HTTPStatus.UNPROCESSABLE_ENTITY
"""A miss is an error of the request: clients would retry the status of an unavailable server."""
MAX_REMEMBERED, MAX_REMEMBERED_BYTES = 10_000, 64 << 20
DONE = {"success": True, "message": "this is a recorded engine: nothing was done"}
MARKED = {"text": "", "output_ids": [], "meta_info": {"finish_reason": {"type": "abort", "message": "Abort"}}}


class ReplayAnswers:
    """Answers from ``cassette``. ``speed`` 1 replays the recorded delays, 0 none. ``recording`` asks for missing calls.

    ``on_miss`` is called with a description of each miss.
    """

    def __init__(
        self, cassette: Cassette, speed: float, recording: UpstreamRecording | None, on_miss: Callable[[str], None]
    ) -> None:
        self.state = ReplayedState()
        self.given: deque[CallRequest] = deque()
        """The last calls that got recorded answers or were forwarded."""
        self._num_given_bytes = 0
        self._cassette = cassette
        self._speed = speed
        self._recording = recording
        self._on_miss = on_miss
        self._administration = app_of(Administration(self.state).routes())

    async def answer(self, request: CallRequest, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, whose body has been read."""
        if request.route == WORKERS:
            await send_error(send, HTTPStatus.NOT_FOUND, "a recording is of a single engine and lists no workers")
        elif request.route in HEALTH:
            await send_json(send, HTTPStatus.OK, b"")
        elif request.method != "POST":
            await self._answer_fact(request, scope, receive, send)
        elif request.route in MODELLED:
            await self._administration(scope, _given(request.body, receive), send)
        elif request.route in ADMINISTRATION:
            await send_json(send, HTTPStatus.OK, encode(DONE))
        elif request.is_mark:
            await send_json(send, HTTPStatus.OK, encode(MARKED))
        else:
            await self._replay(request, scope, receive, send)

    async def _answer_fact(self, request: CallRequest, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            reply = self._fact(request)
        except RecordingDamaged as error:
            await self._miss(request, send, str(error))
            return
        if reply is not None:
            await _send_whole(send, reply)
        elif self._recording is not None:
            await self._recording.relay(request, scope, receive, send)
        else:
            # An unknown route is not a miss: clients probe for routes to detect the kind of engine.
            await send_error(send, HTTPStatus.NOT_FOUND, f"{request.method} {request.path} was not recorded")

    def _fact(self, request: CallRequest) -> CallReply | None:
        reply = self._cassette.take(request)
        if reply is None and request.path != request.route:
            # The query may differ; the recorder asked for the whole fact.
            reply = self._cassette.take(CallRequest.read(request.method, request.route, b""))
        if reply is None or reply.status != HTTPStatus.OK:
            return reply
        changed = self._changed(request.route)
        return _with(reply, changed) if changed else reply

    def _changed(self, route: str) -> dict[str, Any]:
        if route == LOADS:
            load = {"num_running_reqs": self.state.num_in_flight, "num_waiting_reqs": 0}
            return {"loads": [{"dp_rank": 0, **load}]}
        version = self.state.weight_version
        return {"weight_version": version} if version is not None and route in VERSIONED else {}

    async def _replay(self, request: CallRequest, scope: Scope, receive: Receive, send: Send) -> None:
        if request.is_drawn:
            connection = ReplyHandle.of(scope)
            await self.state.opened()
            if connection is not None and connection.is_over:
                raise ClientGone  # the client retries, and the retry gets the answer
        try:
            reply = self._cassette.take(request)
            reason = "" if reply is not None else self._cassette.nearest(request)
        except RecordingDamaged as error:
            reply, reason = None, str(error)
        except InvalidInput as error:
            await self._miss(request, send, str(error))
            return
        except AllGiven as error:
            count = f"{error.num_answers} answer{'s' if error.num_answers > 1 else ''}"
            reply, reason = None, f"all {count} recorded for it have been given; --again starts over"
        if reply is not None:
            with self.state.answering(request.rid) as call:
                self._remember(request)
                await self._play(reply, call, scope, send)
        elif self._recording is not None:
            await self._ask_upstream(request, self._recording, scope, receive, send)
        else:
            await self._miss(request, send, reason)

    def _remember(self, request: CallRequest) -> None:
        if len(self.given) == MAX_REMEMBERED:
            self._num_given_bytes -= len(self.given.popleft().body)
        self.given.append(request)
        self._num_given_bytes += len(request.body)
        while self._num_given_bytes > MAX_REMEMBERED_BYTES and len(self.given) > 1:
            self._num_given_bytes -= len(self.given.popleft().body)

    async def _ask_upstream(
        self, request: CallRequest, recording: UpstreamRecording, scope: Scope, receive: Receive, send: Send
    ) -> None:
        logger.info("not recorded, asked upstream: %s %s", request.method, request.path)
        self._remember(request)  # before the client has the answer and looks for its call
        await recording.ask_facts(scope["headers"])
        await recording.relay(request, scope, receive, send, partial(self._cassette.add_given, request))

    async def _miss(self, request: CallRequest, send: Send, reason: str) -> None:
        whose = f" of group and slot {request.lane}" if request.lane else ""
        message = f"no recorded answer for {request.method} {request.path}{whose}: {reason}"
        logger.warning("%s", message)
        self._on_miss(message)
        await send_error(send, MISS_STATUS, message)

    async def _play(self, reply: CallReply, call: AnswerInFlight, scope: Scope, send: Send) -> None:
        if not reply.content_type.startswith(STREAM) and reply.is_whole:
            if self._speed and reply.parts:
                await call.until(_now_s() + reply.parts[-1][0] / self._speed)
            await _send_whole(send, reply)
            return
        began_s = _now_s()
        await send({"type": "http.response.start", "status": reply.status, "headers": _headers(reply)})
        for at_s, content in reply.parts:
            if self._speed:
                await call.until(began_s + at_s / self._speed)
            await send({"type": "http.response.body", "body": content, "more_body": True})
        if reply.is_whole:
            await send({"type": "http.response.body", "body": b""})
        else:
            break_off(scope)


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _headers(reply: CallReply) -> list[tuple[bytes, bytes]]:
    return [(b"content-type", reply.content_type.encode("latin-1"))] if reply.content_type else []


async def _send_whole(send: Send, reply: CallReply) -> None:
    body = reply.body
    length = (b"content-length", b"%d" % len(body))
    await send({"type": "http.response.start", "status": reply.status, "headers": [*_headers(reply), length]})
    await send({"type": "http.response.body", "body": body})


def _with(reply: CallReply, changed: dict[str, Any]) -> CallReply:
    """The reply with some fields changed, if its body is a JSON object."""
    try:
        body = msgspec.json.decode(reply.body, type=dict[str, Any])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return reply
    kind = JSON_HEADER[1].decode()
    return CallReply(reply.status, kind, [(0.0, encode({**body, **changed}))])


def _given(body: bytes, receive: Receive) -> Receive:
    """``receive``, preceded by a body that has been read already."""
    messages: list[Any] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Any:
        return messages.pop() if messages else await receive()

    return receive_again
