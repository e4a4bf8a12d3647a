"""The rollouts that agents execute: key, session and record of an open one, and what is kept of those that are over.

Kept are the records of those that were closed, and the names of those that came to their caps.
"""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from typing import Any

from forebay.core.clock import ActiveClock
from forebay.core.errors import InvalidInput
from forebay.core.ids import run_rid_prefix
from forebay.core.waiting import Signal
from forebay.engines.capture.trajectory import Trajectory
from forebay.engines.capture.turn import Turn
from forebay.engines.pool import EnginePool
from forebay.gateway.request_bodies import OpenRollout
from forebay.gateway.runs.run_trace import SessionTrace
from forebay.gateway.runs.sessions import Affinity, Session, TurnLog
from forebay.web.replies import encode

ABORTED, RETRIED, CAPPED = "aborted", "retried", "broken"
"""How a rollout ends whose record nobody wants: for good, because another attempt began, or at its cap."""
KEEP_S = 300.0
"""Longer than a caller may wait for an answer that was lost without a word."""
MAX_BYTES = 1 << 26
"""Of all records that are kept for one run; the newest one is kept whatever its size."""
MAX_NAMES = 10_000
"""Newest capped ones that are kept: those before them have been told long since."""


class OpenedRollout:
    """Between the opening of a rollout and its close."""

    def __init__(
        self, run_id: str, body: OpenRollout, key: str, pool: EnginePool, clock: ActiveClock, trace: SessionTrace
    ) -> None:
        """Raises ``InvalidInput`` for a ``rid_prefix`` by which other runs' calls might be aborted."""
        self.run_id = run_id
        self.rollout_id = body.rollout_id
        self.key = key
        self.expiry: asyncio.TimerHandle | None = None
        """When it is forgotten if nobody closes it."""
        self._notices = pool.notices
        self._trajectory = Trajectory(body.rollout_id)
        self.session = Session(
            Affinity(pool, body.engine_url),
            clock,
            _rid_prefix(run_id, body),
            body.deadline_s,
            TurnLog(self._record, may_take_in_thread=True),  # a trajectory has a lock
            trace,
            session_id=body.rollout_id,
            defaults=body.sampling_params,
            max_tokens=body.max_tokens,
            cap_tokens=body.cap_tokens,
        )

    async def final_record(self) -> bytes:
        """The record as JSON, once the last call has ended."""
        await self.session.wait_idle()
        record = await self.record()
        is_good = record["samples"] or not record["failures"]
        self.session.trace.end(CAPPED if self.session.is_capped else "finished" if is_good else "failed")
        return encode(record)

    async def given_up(self, ending: str) -> None:
        """Nobody asks for its record: it is over once its last call has ended."""
        await self.session.wait_idle()
        self.session.trace.end(ending, is_last=ending != RETRIED)

    async def record(self) -> dict[str, Any]:
        """What its calls have come to so far: the samples, the one of the policy's newest turn last."""
        await self.session.turns.drain()
        samples = self._trajectory.samples()
        return {
            "rollout_id": self.rollout_id,
            "samples": [sample.fields() for sample in samples],
            "counters": dict(self._trajectory.counters) | dict(self.session.counters),
            "notes": dict(self.session.notes),
            "num_calls": self.session.num_calls,
            "failures": list(self.session.failures),
            "finish_reason": samples[-1].finish_reason if samples else "",
            "broken_tokens": self.session.cap.num_sampled if self.session.is_capped else None,
            "trace": {"turns": self.session.trace.turns()},
        }

    def _record(self, turns: Sequence[Turn]) -> None:
        self._notices.note(turns, self.run_id)
        for turn in turns:
            self._trajectory.add(turn)


def _rid_prefix(run_id: str, body: OpenRollout) -> str:
    of_run = run_rid_prefix(run_id)
    if body.rid_prefix is None:
        # Of fixed length: engines abort by prefix, and "task-1" must not end the calls of "task-10".
        return f"{of_run}{sha256(body.rollout_id.encode()).hexdigest()[:16]}-"
    if not body.rid_prefix.startswith(of_run):
        raise InvalidInput(f"rid_prefix must begin with {of_run!r}", field="rid_prefix")
    return body.rid_prefix


@dataclass(frozen=True, slots=True)
class _Kept:
    content: bytes
    until_s: float


class ClosedRollouts:
    """The records of one run's rollouts, as JSON: those that are closing, and those that closed lately.

    A caller whom the answer did not reach asks again.
    """

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


class CappedRollouts:
    """Those that have come to their caps: whoever runs their agents asks for all of them at once.

    They are numbered in the order in which they came there, from 1, and kept in memory only: a gateway that was
    started again counts anew.
    """

    def __init__(self) -> None:
        self.num = 0
        """So far."""
        self._names: deque[str] = deque(maxlen=MAX_NAMES)
        self._changed = Signal()

    def add(self, rollout_id: str) -> None:
        """One more."""
        self.num += 1
        self._names.append(rollout_id)
        self._changed.notify()

    async def after(self, number: int, limit_s: float) -> list[str]:
        """Those that came after the ``number``-th; waits up to so many seconds for one.

        All of them where there are not so many: whoever asks has counted those of another process.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while number == self.num:
                    await self._changed.wait(limit_s)
        num_new = self.num if number > self.num else self.num - number
        return list(islice(self._names, max(0, len(self._names) - num_new), None))
