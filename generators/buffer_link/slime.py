"""The link to slime's own rollout buffer, or to any address without a run key. It only sends samples, one per call.

``SampleSender`` is for generators that run their own rollouts, like those of slime.
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
    NoteFull,
    Plan,
    ProgressReport,
    RunGone,
    RunWriting,
    ignore,
    text_of,
)

logger = logging.getLogger(__name__)

_HEADERS = {**JSON_BODY, WRITER_HEADER: "base-generator"}


class SampleSender:
    """Posts finished samples to ``{url}/buffer/write`` until each is acknowledged. Thread-safe."""

    def __init__(self, url: str) -> None:
        self._transport = Transport(url)
        weakref.finalize(self, self._transport.close)  # its generator does not report its end

    def send(self, sample: Sample) -> None:
        """Send a sample and return once the buffer has it. Waits while the buffer is full or does not answer.

        A rejected sample is only logged. Raises ``RunGone`` once the run is over, and ``TypeError`` for values that
        JSON cannot hold.
        """
        if "uid" not in sample:  # the buffer needs it to recognize a sample whose acknowledgement was lost
            sample = {**sample, "uid": token_hex(12)}
        # Without the writer header: the generator sets all fields of the sample itself.
        call = Call("POST", "buffer/write", as_json(encode_sample(sample)), JSON_BODY, WRITE_TIMEOUT_S)
        reply = self._transport.run(answered(call, ENDLESS_S, BUSY))
        if reply.status in GONE:
            raise RunGone(f"the buffer returned {reply.status}: {text_of(reply)}")
        if not reply.is_success:
            logger.error("the buffer refused sample %r: %d %s", sample["uid"], reply.status, text_of(reply))


class SlimeLink(Link):
    """Writes to ``{url}/buffer/write``, without plans, progress reports or a feed."""

    has_feed = False
    takes_failed = False

    def _writing(self, max_waiting: int) -> RunWriting:
        # One per call: an acknowledged sample must not be sent again, because this buffer may not detect duplicates.
        return _SlimeWriting("buffer/write", max_waiting, max_samples=1)

    async def plan(self, fallback: Plan) -> Plan:
        return fallback

    async def report(self, progress: ProgressReport, note_full: NoteFull = ignore) -> None:
        """Do nothing: this buffer takes no reports."""

    async def closed_groups(self, before: ClosedGroups) -> ClosedGroups:  # noqa: ARG002 - this buffer has no feed
        raise LinkRefused("this buffer does not report closed groups", hint="check has_feed before calling this")


class _SlimeWriting(RunWriting):
    takes_parts = False

    def call(self, bodies: Sequence[bytes]) -> Flow[Call]:
        yield from ()
        return Call("POST", "buffer/write", as_json(bodies[0]), _HEADERS, WRITE_TIMEOUT_S)

    def verdicts(self, reply: ServerReply, count: int) -> list[ForebayError | None] | None:
        if reply.status in GONE:
            return None
        return [LinkRefused(f"{reply.status}: {text_of(reply)}") if reply.status >= 400 else None] * count
