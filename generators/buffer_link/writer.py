"""Getting samples to the buffer: in batches, again and again until each is acknowledged."""

import logging
from collections import deque
from typing import Any

import msgspec

from forebay.client.sample_writer.encode import encode_sample
from forebay.core.backoff import Backoff
from forebay.core.waiting import Signal
from forebay.generators.buffer_link.abc import BufferBusy, Link, Verdict

logger = logging.getLogger(__name__)

Sample = dict[str, Any]

MAX_BATCH_SAMPLES = 64
MAX_BATCH_BYTES = 8 << 20


class _Outgoing(msgspec.Struct):
    sample: Sample
    body: bytes


class Writer:
    """A queue of finished samples and the task that empties it.

    ``max_waiting`` samples may wait; a rollout that brings another waits with it, which is how a buffer without room
    slows generation down.
    """

    def __init__(self, link: Link, max_waiting: int) -> None:
        self._link = link
        self._max_waiting = max_waiting
        self._waiting: deque[_Outgoing] = deque()
        self._changed = Signal()
        self._is_closing = False
        self.num_acknowledged = 0
        self.num_refused = 0

    async def put(self, sample: Sample) -> None:
        """Take a sample, once there is room. Raises ``TypeError`` if it cannot be JSON."""
        outgoing = _Outgoing(sample, encode_sample(sample))
        while len(self._waiting) >= self._max_waiting:
            await self._changed.wait(60.0)
        self._waiting.append(outgoing)
        self._changed.notify()

    def finish(self) -> None:
        """No sample comes any more: ``run`` returns when the last one is acknowledged."""
        self._is_closing = True
        self._changed.notify()

    async def run(self) -> None:
        """Write until finished. Raises ``RunGone``."""
        while self._waiting or not self._is_closing:
            if not self._waiting:
                await self._changed.wait(60.0)
                continue
            await self._deliver(self._next_batch())

    def _next_batch(self) -> list[_Outgoing]:
        batch: list[_Outgoing] = []
        size = 0
        while self._waiting and len(batch) < MAX_BATCH_SAMPLES:
            size += len(self._waiting[0].body)
            if batch and size > MAX_BATCH_BYTES:
                break
            batch.append(self._waiting.popleft())
        self._changed.notify()
        return batch

    async def _deliver(self, batch: list[_Outgoing]) -> None:
        pause, one_by_one = Backoff(), False
        while batch:
            told_s: float | None = None
            before = len(batch)
            try:
                batch = await (self._offer_singly(batch) if one_by_one else self._offer(batch))
            except BufferBusy as busy:
                told_s, one_by_one = busy.retry_after_s, busy.may_split and len(batch) > 1
                if one_by_one:
                    continue
            if batch and len(batch) == before:
                await pause.wait(told_s)

    async def _offer_singly(self, batch: list[_Outgoing]) -> list[_Outgoing]:
        """A refusal of a whole batch may be due to one of its samples: the others must not wait for it."""
        left: list[_Outgoing] = []
        for outgoing in batch:
            try:
                left += await self._offer([outgoing])
            except BufferBusy:
                left.append(outgoing)
        return left

    async def _offer(self, batch: list[_Outgoing]) -> list[_Outgoing]:
        """Offer once; what is to be offered again."""
        verdicts = await self._link.write([outgoing.body for outgoing in batch])
        settled = [self._settle(outgoing, verdict) for outgoing, verdict in zip(batch, verdicts, strict=True)]
        return [outgoing for outgoing in settled if outgoing]

    def _settle(self, outgoing: _Outgoing, verdict: Verdict) -> _Outgoing | None:
        if verdict.must_repeat:
            return outgoing
        if not verdict.problem:
            self.num_acknowledged += 1
            return None
        logger.error("the buffer refused the sample of %r: %s", outgoing.sample["instance_id"], verdict.problem)
        is_of_slot = not outgoing.sample.get("fork") and self._link.takes_failed
        if not is_of_slot or outgoing.sample.get("status") == "failed":
            self.num_refused += 1
            return None
        return _as_refused(outgoing.sample, verdict.problem)


def _as_refused(sample: Sample, problem: str) -> _Outgoing:
    """The same rollout as a failed sample: its slot is filled, and the group does not wait for its deadline."""
    kept = {key: sample[key] for key in ("uid", "instance_id", "epoch", "slot", "attempt", "rollout_id")}
    failed = {**kept, "messages": [], "status": "failed", "error": {"type": "SampleRefused", "message": problem}}
    return _Outgoing(failed, msgspec.json.encode(failed))
