"""One request to an engine, which is told to stop if nobody waits for the reply any more."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus

import msgspec

from forebay.core.errors import EngineUnavailable
from forebay.engines.admin import UNAVAILABLE_STATUSES, status_error
from forebay.engines.ring import Target
from forebay.gateway.engine_http import Answer, Events
from forebay.gateway.recording import Wire
from forebay.gateway.runs.run import GatewayRun
from forebay.gateway.runs.sessions import Session

CHATS = "/v1/chat/completions"

_encode = msgspec.json.Encoder().encode


class EngineRefused(Exception):
    """The engine answered with something else than what was asked for; the agent is to get it as it is."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.status)
        self.answer = answer

    @property
    def kind(self) -> str:
        """Whose failure it is: the ``agent``'s if the engine refused what it was asked for, else the ``engine``'s."""
        is_refused = HTTPStatus.BAD_REQUEST <= self.answer.status < HTTPStatus.INTERNAL_SERVER_ERROR
        return "agent" if is_refused else "engine"

    @property
    def told(self) -> str:
        """The beginning of what the engine said."""
        return self.answer.content[:1_000].decode(errors="replace")


@dataclass(frozen=True, slots=True)
class Sent:
    """A request that an engine is answering, with a 200."""

    reply: Events
    target: Target
    rid: str
    began_s: float
    weight_version: str | None
    """The weights before the request; only asked for streams, which do not tell theirs."""
    extra_key: str | None
    """Under which the engine has cached it."""


@asynccontextmanager
async def send(run: GatewayRun, session: Session, wire: Wire) -> AsyncIterator[Sent]:
    """Ask the session's engine. Raises ``EngineUnavailable``, and ``EngineRefused`` for any status but 200.

    However this is left before the reply has come whole, the engine is told to stop.
    """
    member = await session.affinity.choose()
    target, rid = member.server, session.next_rid()
    announced = run.ring.weight_version
    version = await run.versions.before(target.url, announced) if wire.is_stream and target.is_sglang else None
    asked = wire.asked(rid, announced, is_sglang=target.is_sglang)
    is_over = False
    try:
        with run.ring.occupied(member), session.asking(target.url, rid):
            began_s = time.time()
            async with run.upstream.events("POST", target.url + CHATS, _encode(asked)) as reply:
                if reply.status != HTTPStatus.OK:
                    raise await _refusal(run, target, wire, await reply.whole())
                member.recovered()
                yield Sent(reply, target, rid, began_s, version, asked.get("extra_key"))
        is_over = True
    except EngineUnavailable:
        is_over = True
        member.failed()
        raise
    except EngineRefused:
        is_over = True
        raise
    finally:
        if not is_over:
            run.abandon(target.url, rid)


async def _refusal(run: GatewayRun, target: Target, wire: Wire, answer: Answer) -> Exception:
    """What to raise for an error status. Engines repeat what they refuse: they are asked in the agent's words."""
    if answer.status in UNAVAILABLE_STATUSES:
        return status_error(target.url, answer.status, answer.content)
    refused = EngineRefused(answer)
    if not target.is_sglang or refused.kind == "engine":
        return refused
    plain = await run.upstream.ask("POST", target.url + CHATS, _encode(wire.body))
    return refused if plain.status == HTTPStatus.OK else EngineRefused(plain)
