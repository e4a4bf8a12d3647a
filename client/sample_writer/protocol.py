"""The requests of a writer, as flows, and the buffer's result for each sample."""

import gzip
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from secrets import token_hex
from typing import Literal, TypeAlias

import msgspec

from forebay.client.calls.flow import ENDLESS_S, TRANSIENT, Call, Flow, Pause, ServerReply, Work, answered
from forebay.client.errors import error_in, error_of
from forebay.client.sample_writer.encode import SAMPLES_TYPE, encode_sample, join_samples
from forebay.client.sample_writer.encode_parts import take_parts
from forebay.client.sample_writer.outbox import NEVER_S, Outbox, QueuedSample, Sample, WriteLimits
from forebay.core.backoff import Backoff
from forebay.core.binary_sample import is_raw
from forebay.core.errors import ForebayError, InvalidInput, MissingExtra
from forebay.core.parts import NamedPart

logger = logging.getLogger(__name__)

Encoding: TypeAlias = Literal["gzip", "zstd"]
"""The compression of request bodies."""
OnRefused: TypeAlias = Callable[[Sample, ForebayError], object]
"""A callback for a refused sample and its error; its return value is ignored."""
Verdicts: TypeAlias = Sequence[ForebayError | None]
"""The error of each sample of a batch; None for a stored one."""

NDJSON_TYPE = "application/x-ndjson"
LEVEL = 1
SMALLEST_COMPRESSED_BYTES = 1_024
WRITE_TIMEOUT_S = 90.0
REPEATABLE_CODES = frozenset({"buffer_full", "storage_failed"})
"""Error codes after which the same sample may be accepted a little later."""
NO_ROOM = frozenset({429, 507})
FATAL = frozenset({401, 403, 404, 405, 410})
"""Statuses that apply to every sample: wrong address, wrong token, no such run."""


def read_verdicts(body: bytes, count: int) -> Verdicts | None:
    """The results for ``count`` samples in a reply; None if it has none."""
    try:
        results = msgspec.json.decode(body).get("results")
    except (msgspec.DecodeError, AttributeError):
        return None
    if not isinstance(results, list) or len(results) != count:  # a reply of another server, or for other samples
        return None
    return [error_in(result.get("error"), result.get("status")) for result in results]


class Writing:
    """The protocol of one writer: sends the samples of its ``outbox`` until each is acknowledged or refused.

    To write to another kind of buffer, override ``call``, ``verdicts`` and ``hopeless``.
    """

    no_room = NO_ROOM
    """Statuses of a reachable buffer without room; the writer waits for room without a time limit."""
    takes_parts = True
    """Whether the buffer stores parts. Otherwise images stay in the messages, and arrays are left out."""
    splits_without_room = False
    """Whether a batch that found no room is resent at once in smaller parts."""

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

    def encoded(self, sample: Sample) -> tuple[Sample, bytes, Mapping[str, NamedPart]]:
        """What ``Outbox.put`` queues for a sample; one without a ``uid`` gets one.

        Raises ``TypeError`` if it cannot be encoded, ``InvalidInput`` if its arrays do not fit its tokens.
        """
        if "uid" not in sample:  # lets the buffer recognise a sample that is resent after a lost acknowledgement
            sample = {**sample, "uid": token_hex(12)}
        fields, parts = take_parts(sample) if self.takes_parts else (_without_parts(sample), {})
        return sample, encode_sample(fields), parts

    def run(self) -> Flow[None]:
        """Send until the outbox is closed and empty, or an error makes it impossible; that error goes to the outbox."""
        try:
            yield from self._send_all()
        except Exception as error:  # noqa: BLE001 - any error must reach the callers that wait for their samples
            self.outbox.fail(error)

    def _send_all(self) -> Flow[None]:
        pause, left, again_at_s = Backoff(), list[QueuedSample](), 0.0
        while left or not self.outbox.is_empty_for_good:
            fresh_s, again_s = self.outbox.pause_s, again_at_s - time.monotonic() if left else NEVER_S
            if min(fresh_s, again_s) > 0:
                yield Pause(min(fresh_s, again_s), is_wakeable=True)
                continue
            # Samples without room do not block later ones, which may belong to open groups: the buffer accepts those,
            # and needs them before a trainer can read groups and so make room.
            offered = self.outbox.take() if fresh_s <= 0 else []
            if again_s <= 0:
                offered, left = left + offered, []
            again, retry_after_s = yield from self._offer(offered)
            if len(again) < len(offered):
                pause.reset()
            # Samples that already wait keep their retry time; otherwise each new one would postpone it.
            if again and not left:
                again_at_s = time.monotonic() + pause.next_s(retry_after_s)
            left += again

    def _offer(self, batch: list[QueuedSample]) -> Flow[tuple[list[QueuedSample], float | None]]:
        """Send until judged. Returns the samples to send again, and the seconds after which there may be room for them.

        Raises an error that applies to all further samples.
        """
        if len(batch) > self._max_samples:  # samples without room accumulate
            return (yield from self._offer_halves(batch))
        parts = {digest: part for queued in batch for digest, part in queued.parts.items()}
        frames = [part.frame for part in parts.values()]
        call = yield from self.call([*frames, *(queued.body for queued in batch)])
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
        return (yield from self._offer_halves(batch))  # one invalid sample, or too many at once, may be the cause

    def _offer_halves(self, batch: list[QueuedSample]) -> Flow[tuple[list[QueuedSample], float | None]]:
        middle = len(batch) // 2
        first, _ = yield from self._offer(batch[:middle])
        second, retry_after_s = yield from self._offer(batch[middle:])
        return first + second, retry_after_s

    def _judge(self, batch: list[QueuedSample], verdicts: Verdicts) -> list[QueuedSample]:
        """Note the buffer's result for each sample. Returns the samples to send again."""
        judged = list(zip(batch, verdicts, strict=True))
        self.outbox.acknowledged([queued for queued, error in judged if error is None])
        again = [self._next_of(queued, error) for queued, error in judged if error is not None]
        return [queued for queued in again if queued is not None]

    def _next_of(self, queued: QueuedSample, error: ForebayError) -> QueuedSample | None:
        """What to send after ``error``: the sample again, a replacement, or nothing."""
        if error.code in REPEATABLE_CODES:
            return queued
        logger.error("the buffer refused sample %r: %s", queued.sample.get("uid"), error)
        if (replacement := self.replacement(queued.sample, error)) is not None:
            return self.outbox.replace(queued, replacement, encode_sample(replacement))
        if self._on_refused is not None:
            self._on_refused(queued.sample, error)
        self.outbox.refused(queued, error, is_reported=self._on_refused is not None)
        return None

    def replacement(self, sample: Sample, error: ForebayError) -> Sample | None:  # noqa: ARG002 - overrides use both
        """The sample to send in place of a refused one, if any."""
        return None

    def verdicts(self, reply: ServerReply, count: int) -> Verdicts | None:
        """The result for each of ``count`` samples in ``reply``; None if it has none."""
        return read_verdicts(reply.body, count)

    def hopeless(self, reply: ServerReply, error: ForebayError) -> ForebayError | None:
        """``error``, if ``reply`` means that no sample will ever be accepted; else None."""
        is_of_samples = 400 <= reply.status < 500 and reply.status not in FATAL and error.field != "Content-Encoding"
        return None if is_of_samples else error

    def call(self, bodies: Sequence[bytes]) -> Flow[Call]:
        """The request that sends encoded samples, after the frames of their parts."""
        has_arrays = any(map(is_raw, bodies))
        body = join_samples(bodies) if has_arrays else b"\n".join(bodies)
        headers = {"Content-Type": SAMPLES_TYPE if has_arrays else NDJSON_TYPE}
        # In a thread: compressing megabytes would block the generator's event loop.
        if self._encoding and len(body) >= SMALLEST_COMPRESSED_BYTES:
            body = yield Work(partial(self._compress, body))
            headers["Content-Encoding"] = self._encoding
        return Call("POST", self._path, body, headers, WRITE_TIMEOUT_S)


def _without_parts(sample: Sample) -> Sample:
    return {name: value for name, value in sample.items() if name not in ("parts", "arrays")}


def _compressor(encoding: Encoding | None) -> Callable[[bytes], bytes]:
    """The function that compresses a body. Raises ``MissingExtra`` if zstd is not installed."""
    if encoding is None:
        return bytes
    if encoding == "gzip":
        return lambda body: gzip.compress(body, LEVEL)
    if encoding != "zstd":
        raise InvalidInput(f"encoding must be gzip or zstd (got {encoding!r})", field="encoding")
    try:
        import zstandard
    except ImportError:
        raise MissingExtra("zstandard", "zstd") from None
    return lambda body: zstandard.ZstdCompressor(LEVEL).compress(body)
