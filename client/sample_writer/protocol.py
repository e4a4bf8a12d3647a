"""What a writer says to the server, as flows, and what the buffer says of each sample."""

import gzip
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from secrets import token_hex
from typing import Literal, TypeAlias

import msgspec

from forebay.client.calls.flow import ENDLESS_S, TRANSIENT, Call, Flow, Pause, ServerReply, Work, answered
from forebay.client.errors import error_in, error_of
from forebay.client.sample_writer.encode import SAMPLES_TYPE, encode_sample, join_samples
from forebay.client.sample_writer.outbox import NEVER_S, Outbox, QueuedSample, Sample, WriteLimits
from forebay.core.backoff import Backoff
from forebay.core.binary_sample import is_binary
from forebay.core.errors import ForebayError, InvalidInput, MissingExtra

logger = logging.getLogger(__name__)

Encoding: TypeAlias = Literal["gzip", "zstd"]
"""How bodies are compressed."""
OnRefused: TypeAlias = Callable[[Sample, ForebayError], object]
"""Called with a sample that the buffer will not take, and why; what it returns is not looked at."""
Verdicts: TypeAlias = Sequence[ForebayError | None]
"""What is wrong with each sample of a batch, None for one that is stored."""

NDJSON_TYPE = "application/x-ndjson"
LEVEL = 1
SMALLEST_COMPRESSED_BYTES = 1_024
WRITE_TIMEOUT_S = 90.0
REPEATABLE_CODES = frozenset({"buffer_full", "storage_failed"})
"""Codes of errors that say: the same sample is right a little later."""
NO_ROOM = frozenset({429, 507})
FATAL = frozenset({401, 403, 404, 405, 410})
"""Statuses that say the same to every sample: wrong address, wrong token, no such run."""


def read_verdicts(body: bytes, count: int) -> Verdicts | None:
    """What a reply says of ``count`` samples; None if it has no verdicts."""
    try:
        results = msgspec.json.decode(body).get("results")
    except (msgspec.DecodeError, AttributeError):
        return None
    if not isinstance(results, list) or len(results) != count:  # then they are of another server, or of other samples
        return None
    return [error_in(result.get("error"), result.get("status")) for result in results]


class Writing:
    """The protocol of one writer: sends what is in its ``outbox`` until each sample is acknowledged or refused.

    A derived class may speak with a buffer of another kind: ``call``, ``verdicts`` and ``hopeless`` say how.
    """

    no_room = NO_ROOM
    """Statuses of a buffer that lives and has no room: it is waited for, however long that takes."""
    splits_without_room = False
    """Whether what there was no room for is offered in smaller parts at once."""

    def __init__(
        self,
        path: str,
        limits: WriteLimits,
        encoding: Encoding | None = None,
        retry_for_s: float = ENDLESS_S,
        on_refused: OnRefused | None = None,
    ) -> None:
        self.outbox = Outbox(limits)
        self._max_samples = limits.max_samples
        self.retry_for_s = retry_for_s
        self._path = path
        self._encoding = encoding
        self._compress = _compressor(encoding)
        self._on_refused = on_refused

    def put(self, sample: Sample) -> bool:
        """Encode and queue a sample; one without a ``uid`` gets one. Whether the flow is to be woken.

        Raises ``TypeError`` if it cannot be encoded, and what ``Outbox.put`` raises.
        """
        if "uid" not in sample:  # by it the buffer knows a sample whose acknowledgement was lost
            sample = {**sample, "uid": token_hex(12)}
        return self.outbox.put(sample, encode_sample(sample))

    def run(self) -> Flow[None]:
        """Send until the outbox is closed and empty, or until sending is hopeless: then the outbox knows why."""
        try:
            yield from self._send_all()
        except Exception as error:  # noqa: BLE001 - whatever it is: those who wait for their samples must hear of it
            self.outbox.fail(error)

    def _send_all(self) -> Flow[None]:
        pause, left, again_at_s = Backoff(), list[QueuedSample](), 0.0
        while left or not self.outbox.is_empty_for_good:
            fresh_s, again_s = self.outbox.pause_s, again_at_s - time.monotonic() if left else NEVER_S
            if min(fresh_s, again_s) > 0:
                yield Pause(min(fresh_s, again_s), is_wakeable=True)
                continue
            # What there is no room for holds up nothing that follows: that may be of open groups, which are taken, and
            # without which no trainer can make room.
            offered = self.outbox.take() if fresh_s <= 0 else []
            if again_s <= 0:
                offered, left = left + offered, []
            again, retry_after_s = yield from self._offer(offered)
            if len(again) < len(offered):
                pause.reset()
            # Those that wait already keep their time: else each new one would put it off.
            if again and not left:
                again_at_s = time.monotonic() + pause.next_s(retry_after_s)
            left += again

    def _offer(self, batch: list[QueuedSample]) -> Flow[tuple[list[QueuedSample], float | None]]:
        """Offer until judged; what is to be offered again, and in how many seconds there may be room for it.

        Raises what makes it impossible to go on.
        """
        if len(batch) > self._max_samples:  # those without room gather
            return (yield from self._offer_halves(batch))
        call = yield from self.call([queued.body for queued in batch])
        reply = yield from answered(call, self.retry_for_s, TRANSIENT - self.no_room)
        if reply.status in self.no_room:
            if self.splits_without_room and len(batch) > 1:
                return (yield from self._offer_halves(batch))
            return batch, reply.retry_after_s
        verdicts = self.verdicts(reply, len(batch))
        if verdicts is not None:
            return self._judge(batch, verdicts), reply.retry_after_s
        error = error_of(reply.status, reply.body, str(call))
        if (hopeless := self.hopeless(reply, error)) is not None:
            raise hopeless
        if len(batch) == 1:
            return self._judge(batch, [error]), None
        return (yield from self._offer_halves(batch))  # what is wrong with all may be due to one, or to their number

    def _offer_halves(self, batch: list[QueuedSample]) -> Flow[tuple[list[QueuedSample], float | None]]:
        middle = len(batch) // 2
        first, _ = yield from self._offer(batch[:middle])
        second, retry_after_s = yield from self._offer(batch[middle:])
        return first + second, retry_after_s

    def _judge(self, batch: list[QueuedSample], verdicts: Verdicts) -> list[QueuedSample]:
        """Note what the buffer says of each sample; what is to be offered again."""
        judged = list(zip(batch, verdicts, strict=True))
        self.outbox.acknowledged([queued for queued, error in judged if error is None])
        again = [self._next_of(queued, error) for queued, error in judged if error is not None]
        return [queued for queued in again if queued is not None]

    def _next_of(self, queued: QueuedSample, error: ForebayError) -> QueuedSample | None:
        """What is offered after ``error``: the sample again, another in its place, or nothing."""
        if error.code in REPEATABLE_CODES:
            return queued
        logger.error("the buffer refused sample %r: %s", queued.sample.get("uid"), error)
        if (replacement := self.replacement(queued.sample, error)) is not None:
            return self.outbox.replace(queued, replacement, encode_sample(replacement))
        if self._on_refused is not None:
            self._on_refused(queued.sample, error)
        self.outbox.refused(queued, error, is_reported=self._on_refused is not None)
        return None

    def replacement(self, sample: Sample, error: ForebayError) -> Sample | None:  # noqa: ARG002 - others look at both
        """What to offer in place of a sample that the buffer will not take."""
        return None

    def verdicts(self, reply: ServerReply, count: int) -> Verdicts | None:
        """What ``reply`` says of each of ``count`` samples, None if it says nothing of them."""
        return read_verdicts(reply.body, count)

    def hopeless(self, reply: ServerReply, error: ForebayError) -> ForebayError | None:
        """Why no sample will ever be taken, if that is what ``reply``, which means ``error``, says."""
        is_of_samples = 400 <= reply.status < 500 and reply.status not in FATAL and error.field != "Content-Encoding"
        return None if is_of_samples else error

    def call(self, bodies: Sequence[bytes]) -> Flow[Call]:
        """The request that offers encoded samples."""
        has_arrays = any(is_binary(body) for body in bodies)
        body = join_samples(bodies) if has_arrays else b"\n".join(bodies)
        headers = {"Content-Type": SAMPLES_TYPE if has_arrays else NDJSON_TYPE}
        # In a thread: compressing megabytes would hold up the event loop that the generator runs in.
        if self._encoding and len(body) >= SMALLEST_COMPRESSED_BYTES:
            body = yield Work(partial(self._compress, body))
            headers["Content-Encoding"] = self._encoding
        return Call("POST", self._path, body, headers, WRITE_TIMEOUT_S)


def _compressor(encoding: Encoding | None) -> Callable[[bytes], bytes]:
    """Raises ``MissingExtra`` where zstd is asked for and not installed."""
    if encoding is None:
        return bytes
    if encoding == "gzip":
        return lambda body: gzip.compress(body, LEVEL)
    if encoding != "zstd":
        raise InvalidInput(f"encoding is gzip or zstd, got {encoding!r}", field="encoding")
    try:
        import zstandard
    except ImportError:
        raise MissingExtra("zstandard", "zstd") from None
    return lambda body: zstandard.ZstdCompressor(LEVEL).compress(body)
