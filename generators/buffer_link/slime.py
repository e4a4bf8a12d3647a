"""The link to slime's own rollout buffer, or to any address without a run key: samples one by one, nothing else.

``SampleSender`` is for generators that run their rollouts themselves, as slime's do.
"""

import logging
import weakref
from collections.abc import Sequence
from secrets import token_hex

from forebay.client.calls.flow import ENDLESS_S, JSON_BODY, Call, Flow, ServerReply, answered
from forebay.client.calls.transport import Transport
from forebay.client.sample_writer.encode import encode_sample
from forebay.client.sample_writer.outbox import Sample
from forebay.client.sample_writer.protocol import WRITE_TIMEOUT_S
from forebay.core.binary_sample import as_json
from forebay.core.errors import ForebayError
from forebay.core.sample import WRITER_HEADER
from forebay.generators.buffer_link.abc import (
    BUSY,
    GONE,
    ClosedGroups,
    Link,
    LinkRefused,
    Plan,
    ProgressReport,
    RunGone,
    RunWriting,
    text_of,
)

logger = logging.getLogger(__name__)

_HEADERS = {**JSON_BODY, WRITER_HEADER: "base-generator"}


class SampleSender:
    """Writes finished samples over ``{url}/buffer/write``, each until it is acknowledged. For any number of threads."""

    def __init__(self, url: str) -> None:
        self._transport = Transport(url)
        weakref.finalize(self, self._transport.close)  # its generator has no end that anybody tells

    def send(self, sample: Sample) -> None:
        """Return when the buffer has the sample; while it has no room, or does not answer, that is waited for.

        One that it refuses is told in the log, and the others go on. Raises ``RunGone`` once the run is over, and
        ``TypeError`` for what cannot be JSON.
        """
        if "uid" not in sample:  # by it the buffer knows a sample whose acknowledgement was lost
            sample = {**sample, "uid": token_hex(12)}
        # Without the header: what stands in the sample is its generator's own.
        call = Call("POST", "buffer/write", as_json(encode_sample(sample)), JSON_BODY, WRITE_TIMEOUT_S)
        reply = self._transport.run(answered(call, ENDLESS_S, BUSY))
        if reply.status in GONE:
            raise RunGone(f"the buffer answers {reply.status}: {text_of(reply)}")
        if not reply.is_success:
            logger.error("the buffer refused sample %r: %d %s", sample["uid"], reply.status, text_of(reply))


class SlimeLink(Link):
    """Writes to ``{url}/buffer/write``; knows no plan, no progress and no feed."""

    has_feed = False
    takes_failed = False

    def _writing(self, max_waiting: int) -> RunWriting:
        # One in a call: what was acknowledged must not be offered again, for this buffer may not know duplicates.
        return _SlimeWriting("buffer/write", max_waiting, max_samples=1)

    async def plan(self, fallback: Plan) -> Plan:
        return fallback

    async def report(self, progress: ProgressReport) -> None:
        """Nobody wants to know."""

    async def closed_groups(self, before: ClosedGroups) -> ClosedGroups:  # noqa: ARG002 - there is no feed
        raise LinkRefused("this buffer does not tell which groups it closed", hint="ask has_feed first")


class _SlimeWriting(RunWriting):
    def call(self, bodies: Sequence[bytes]) -> Flow[Call]:
        yield from ()
        return Call("POST", "buffer/write", as_json(bodies[0]), _HEADERS, WRITE_TIMEOUT_S)

    def verdicts(self, reply: ServerReply, count: int) -> list[ForebayError | None] | None:
        if reply.status in GONE:
            return None
        return [LinkRefused(f"{reply.status}: {text_of(reply)}") if reply.status >= 400 else None] * count
