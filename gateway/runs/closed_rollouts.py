"""The records of rollouts that were closed, for a caller whom the answer did not reach and who asks again."""

import asyncio
import time
from dataclasses import dataclass

KEEP_S = 300.0
"""Longer than a caller may wait for an answer that was lost without a word."""
MAX_BYTES = 1 << 26
"""Of all records that are kept for one run; the newest one is kept whatever its size."""


@dataclass(frozen=True, slots=True)
class _Kept:
    content: bytes
    until_s: float


class ClosedRollouts:
    """The records of one run's rollouts, as JSON: those that are closing, and those that closed lately."""

    def __init__(self) -> None:
        self._closing: dict[str, asyncio.Task[bytes]] = {}
        self._kept: dict[str, _Kept] = {}
        """The oldest first."""
        self._num_bytes = 0

    def add(self, rollout_id: str, closing: "asyncio.Task[bytes]") -> None:
        """A rollout is closing: in the end there will be its record."""
        # What an earlier rollout of this id left would be answered to those who ask for this one.
        self.forget(rollout_id)
        self._closing[rollout_id] = closing
        closing.add_done_callback(lambda _: self._keep(rollout_id, closing))

    async def record(self, rollout_id: str) -> bytes | None:
        """The record, once there is one; None if nothing is known of the rollout, or not any more."""
        closing = self._closing.get(rollout_id)
        if closing is not None:
            return await asyncio.shield(closing)  # this caller may leave: another one asks again
        self._trim()
        kept = self._kept.get(rollout_id)
        return kept.content if kept is not None else None

    def forget(self, rollout_id: str) -> None:
        """Another rollout has its id now."""
        self._closing.pop(rollout_id, None)
        self._drop(rollout_id)

    def _keep(self, rollout_id: str, closed: "asyncio.Task[bytes]") -> None:
        if self._closing.get(rollout_id) is not closed:  # opened again, and perhaps closed again, meanwhile
            return
        del self._closing[rollout_id]
        if closed.cancelled() or closed.exception() is not None:
            return  # nothing to keep: who waited for it got the error
        self._kept[rollout_id] = _Kept(closed.result(), time.monotonic() + KEEP_S)
        self._num_bytes += len(closed.result())
        self._trim()

    def _trim(self) -> None:
        now_s = time.monotonic()
        while self._kept:
            oldest = next(iter(self._kept))
            # One record may be larger than all that is kept: it must be there for the caller that asks again.
            is_too_much = self._num_bytes > MAX_BYTES and len(self._kept) > 1
            if not is_too_much and self._kept[oldest].until_s > now_s:
                return
            self._drop(oldest)

    def _drop(self, rollout_id: str) -> None:
        kept = self._kept.pop(rollout_id, None)
        if kept is not None:
            self._num_bytes -= len(kept.content)
