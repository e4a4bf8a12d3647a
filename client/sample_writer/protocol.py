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

from forebay.client.calls.flow import Call, Flow, Lost, Patience, Pause, Reply, Work, failure, tell_trouble
from forebay.client.errors import error_of, told_error
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
    return [told_error(result.get("error"), result.get("status")) for result in results]


logger = logging.getLogger(__name__)

Encoding: TypeAlias = Literal["gzip", "zstd"]
OnRefused: TypeAlias = Callable[[Sample, ForebayError], object]

NDJSON_TYPE = "application/x-ndjson"
LEVEL = 1
SMALLEST_COMPRESSED_BYTES = 1_024
WRITE_TIMEOUT_S = 90.0
NO_ROOM = frozenset({429, 507})
"""Statuses of a buffer that lives and has no room: it is waited for, however long that takes."""
FATAL = frozenset({401, 403, 404, 405, 410})
"""Statuses that say the same to every sample: wrong address, wrong token, no such run."""


class Writing:
    """The protocol of one writer: sends what is in its ``outbox`` until each sample is acknowledged or refused."""

    def __init__(
        self,
        path: str,
        *,
        limits: Limits,
        encoding: Encoding | None,
        retry_for_s: float,
        on_refused: OnRefused | None,
    ) -> None:
        self.outbox = Outbox(limits)
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
        told = yield from self._answered(batch)
        if told.status in NO_ROOM:
            return batch, told.retry_after_s
        verdicts = read_verdicts(told.body, len(batch))
        if verdicts is not None:
            return self._judge(batch, verdicts), told.retry_after_s
        error = error_of(told.status, told.body, f"POST {self._path}")
        if told.status in FATAL or not 400 <= told.status < 500 or error.field == "Content-Encoding":
            raise error
        if len(batch) == 1:
            self._refuse(batch[0], error)
            return [], None
        middle = len(batch) // 2  # what is wrong with all may be due to one, or to their number
        first, _ = yield from self._offer(batch[:middle])
        second, told_s = yield from self._offer(batch[middle:])
        return first + second, told_s

    def _answered(self, batch: Sequence[Outgoing]) -> Flow[Reply]:
        """The answer to a batch, asked again while there is none. A buffer without room has answered."""
        pause, patience = Backoff(), None
        call = yield from self._call(batch)
        while True:
            told: Reply | Lost = yield call
            if isinstance(told, Reply) and (not told.is_transient or told.status in NO_ROOM):
                return told
            if patience is None:
                patience = Patience(self.retry_for_s)
                tell_trouble(told, call, self.retry_for_s)
            if patience.left_s <= 0:
                raise failure(told, call)
            yield Pause(min(pause.next_s(told.retry_after_s), patience.left_s))

    def _judge(self, batch: Sequence[Outgoing], verdicts: Sequence[ForebayError | None]) -> list[Outgoing]:
        """Note what the buffer says of each sample; those that are to be offered again."""
        judged = list(zip(batch, verdicts, strict=True))
        self.outbox.acknowledged([sent for sent, error in judged if error is None])
        for sent, error in judged:
            if error is not None and error.code not in REPEATABLE_CODES:
                self._refuse(sent, error)
        return [sent for sent, error in judged if error is not None and error.code in REPEATABLE_CODES]

    def _refuse(self, sent: Outgoing, error: ForebayError) -> None:
        logger.error("the buffer refused sample %r: %s", sent.sample.get("uid"), error)
        if self._on_refused is not None:
            self._on_refused(sent.sample, error)
        self.outbox.refused(sent, error, is_told=self._on_refused is not None)

    def _call(self, batch: Sequence[Outgoing]) -> Flow[Call]:
        bodies = [sent.body for sent in batch]
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
