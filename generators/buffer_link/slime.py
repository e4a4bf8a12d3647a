"""The link to slime's own rollout buffer, or to any address without a run key: samples one by one, nothing else."""

from collections.abc import Sequence

from forebay.client.calls.flow import JSON_BODY, Call, Flow, ServerReply
from forebay.client.sample_writer.protocol import WRITE_TIMEOUT_S
from forebay.core.binary_sample import as_json
from forebay.core.errors import ForebayError
from forebay.core.sample import WRITER_HEADER
from forebay.generators.buffer_link.abc import (
    GONE,
    ClosedGroups,
    Link,
    LinkRefused,
    Plan,
    ProgressReport,
    RunWriting,
    text_of,
)

_HEADERS = {**JSON_BODY, WRITER_HEADER: "base-generator"}


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
