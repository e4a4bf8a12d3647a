"""What a writer says to the server, as flows.

What the buffer says of each sample of a write.
"""

import gzip
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from secrets import token_hex
from typing import Literal, TypeAlias

import msgspec

from forebay.client.calls.flow import (
    ENDLESS_S,
    TRANSIENT,
    Call,
    Flow,
    Lost,
    Patience,
    Pause,
    Reply,
    Work,
    failure,
    log_repetition,
)
from forebay.client.errors import error_in, error_of
from forebay.client.sample_writer.encode import SAMPLES_TYPE, encode_sample, join_samples
from forebay.client.sample_writer.outbox import NEVER_S, Limits, Outbox, Outgoing, Sample
from forebay.core.backoff import Backoff
from forebay.core.binary_sample import is_binary
from forebay.core.errors import ForebayError, InvalidInput, MissingExtra

REPEATABLE_CODES = frozenset({"buffer_full", "storage_failed"})
"""Codes of errors that say: the same sample is right a little later."""


def read_verdicts(body: bytes, count: int) -> list[ForebayError | None] | None:
    """What is wrong with each of ``count`` samples, None for one that is stored; None if the reply has no verdicts."""
    try:
        results = msgspec.json.decode(body).get("results")
    except (msgspec.DecodeError, AttributeError):
        return None
    if not isinstance(results, list) or len(results) != count:
        return None
    return [error_in(result.get("error"), result.get("status")) for result in results]


logger = logging.getLogger(__name__)

Encoding: TypeAlias = Literal["gzip", "zstd"]
OnRefused: TypeAlias = Callable[[Sample, ForebayError], object]

NDJSON_TYPE = "application/x-ndjson"
LEVEL = 1
SMALLEST_COMPRESSED_BYTES = 1_024
WRITE_TIMEOUT_S = 90.0
NO_ROOM = frozenset({429, 507})
FATAL = frozenset({401, 403, 404, 405, 410})
"""Statuses that say the same to every sample: wrong address, wrong token, no such run."""


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
        limits: Limits,
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
        if "uid" not in sample:
            sample = {**sample, "uid": token_hex(12)}
        return self.outbox.put(sample, encode_sample(sample))

    def run(self) -> Flow[None]:
        """Send until the outbox is closed and empty, or until sending is hopeless: then the outbox knows why."""
        try:
            yield from self._send_all()
        except Exception as error:  # noqa: BLE001 - whatever it is: those who wait for their samples must hear of it
            self.outbox.fail(error)

    def _send_all(self) -> Flow[None]:
        """What the buffer has no room for is offered again later, and holds up nothing that follows.

        That may be of open groups, which are taken, and without which no trainer can make room.
        """
        pause, left, again_at_s = Backoff(), list[Outgoing](), 0.0
        while left or not self.outbox.is_done:
            fresh_s, again_s = self.outbox.pause_s, again_at_s - time.monotonic() if left else NEVER_S
            if min(fresh_s, again_s) > 0:
                yield Pause(min(fresh_s, again_s), is_wakeable=True)
                continue
            offered = self.outbox.take() if fresh_s <= 0 else []
            if again_s <= 0:
                offered, left = left + offered, []
            without_room, told_s = yield from self._offer(offered)
            if len(without_room) < len(offered):
                pause = Backoff()
            if without_room and not left:
                again_at_s = time.monotonic() + pause.next_s(told_s)
            left += without_room

    def _offer(self, batch: list[Outgoing]) -> Flow[tuple[list[Outgoing], float | None]]:
        """Offer until judged; what there was no room for, and in how many seconds there may be.

        Raises what makes it impossible to go on.
        """
        if len(batch) > self._max_samples:  # those without room gather
            return (yield from self._offer_halves(batch))
        told = yield from self._answered(batch)
        if told.status in self.no_room:
            if self.splits_without_room and len(batch) > 1:
                return (yield from self._offer_halves(batch))
            return batch, told.retry_after_s
        verdicts = self.verdicts(told, len(batch))
        if verdicts is not None:
            return self._judge(batch, verdicts), told.retry_after_s
        error = error_of(told.status, told.body, f"POST {self._path}")
        if (hopeless := self.hopeless(told, error)) is not None:
            raise hopeless
        if len(batch) == 1:
            return self._judge(batch, [error]), None
        return (yield from self._offer_halves(batch))  # what is wrong with all may be due to one, or to their number

    def _offer_halves(self, batch: list[Outgoing]) -> Flow[tuple[list[Outgoing], float | None]]:
        middle = len(batch) // 2
        first, _ = yield from self._offer(batch[:middle])
        second, told_s = yield from self._offer(batch[middle:])
        return first + second, told_s

    def _answered(self, batch: Sequence[Outgoing]) -> Flow[Reply]:
        """The answer to a batch, asked again while there is none. A buffer without room has answered."""
        pause, patience = Backoff(), None
        call = yield from self.call([sent.body for sent in batch])
        while True:
            told: Reply | Lost = yield call
            if isinstance(told, Reply) and told.status not in TRANSIENT - self.no_room:
                return told
            if patience is None:
                patience = Patience(self.retry_for_s)
                log_repetition(told, call, self.retry_for_s)
            if patience.left_s <= 0:
                raise failure(told, call)
            yield Pause(min(pause.next_s(told.retry_after_s), patience.left_s))

    def _judge(self, batch: Sequence[Outgoing], verdicts: Sequence[ForebayError | None]) -> list[Outgoing]:
        """Note what the buffer says of each sample; those that are to be offered again."""
        judged = list(zip(batch, verdicts, strict=True))
        self.outbox.acknowledged([sent for sent, error in judged if error is None])
        again: list[Outgoing] = []
        for sent, error in judged:
            if error is None:
                continue
            if error.code in REPEATABLE_CODES:
                again.append(sent)
            elif (other := self._refuse(sent, error)) is not None:
                again.append(other)
        return again

    def _refuse(self, sent: Outgoing, error: ForebayError) -> Outgoing | None:
        """What goes out in place of a refused sample, if anything does."""
        logger.error("the buffer refused sample %r: %s", sent.sample.get("uid"), error)
        if (replacement := self.replacement(sent.sample, error)) is not None:
            return self.outbox.replace(sent, replacement, encode_sample(replacement))
        if self._on_refused is not None:
            self._on_refused(sent.sample, error)
        self.outbox.refused(sent, error, is_told=self._on_refused is not None)
        return None

    def replacement(self, sample: Sample, error: ForebayError) -> Sample | None:  # noqa: ARG002 - others look at both
        """What to offer in place of a sample that the buffer will not take."""
        return None

    def verdicts(self, reply: Reply, count: int) -> list[ForebayError | None] | None:
        """What ``reply`` says of each of ``count`` samples, None if it says nothing of them."""
        return read_verdicts(reply.body, count)

    def hopeless(self, reply: Reply, error: ForebayError) -> ForebayError | None:
        """Why no sample will ever be taken, if that is what ``reply``, which means ``error``, says."""
        is_of_samples = 400 <= reply.status < 500 and reply.status not in FATAL and error.field != "Content-Encoding"
        return None if is_of_samples else error

    def call(self, bodies: Sequence[bytes]) -> Flow[Call]:
        """The request that offers encoded samples."""
        has_arrays = any(is_binary(body) for body in bodies)
        body = join_samples(bodies) if has_arrays else b"\n".join(bodies)
        headers = {"Content-Type": SAMPLES_TYPE if has_arrays else NDJSON_TYPE}
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
