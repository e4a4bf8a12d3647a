"""The rollouts of agents: key, session and record of an open one, and what is kept of finished ones.

The records of closed rollouts and the names of capped rollouts are kept.
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

from forebay.core.binary_sample import join_samples
from forebay.core.clock import ActiveClock
from forebay.core.errors import InvalidInput
from forebay.core.ids import run_rid_prefix
from forebay.core.waiting import Signal
from forebay.engines.capture.trajectory import Trajectory
from forebay.engines.capture.turn import Turn
from forebay.engines.pool import EnginePool
from forebay.gateway.off_loop import off_loop_if
from forebay.gateway.request_bodies import OpenRollout
from forebay.gateway.runs.run_trace import SessionTrace
from forebay.gateway.runs.sessions import Affinity, Session, TurnLog
from forebay.web.replies import encode

ABORTED, RETRIED, CAPPED = "aborted", "retried", "broken"
"""Endings of a rollout without a final record: aborted, replaced by another attempt, or ended by its cap."""
KEEP_S = 300.0
"""Longer than a caller may wait for a reply that was silently lost."""
MAX_BYTES = 1 << 26
"""Total size of the records kept for one run; the newest one is always kept."""
MAX_NAMES = 10_000
"""Number of the newest capped rollouts to keep; earlier ones were reported long ago."""


class OpenedRollout:
    """A rollout from its opening until its close."""

    def __init__(
        self, run_id: str, body: OpenRollout, key: str, pool: EnginePool, clock: ActiveClock, trace: SessionTrace
    ) -> None:
        """Raises ``InvalidInput`` for a ``rid_prefix`` that could abort the calls of other runs."""
        self.run_id = run_id
        self.rollout_id = body.rollout_id
        self.key = key
        self.expiry: asyncio.TimerHandle | None = None
        """Timer that forgets the rollout if it is never closed."""
        self._notices = pool.notices
        self._has_rows = bool(pool.arrays)
        self._trajectory = Trajectory(body.rollout_id, arrays=pool.arrays)
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
            recorded=self._trajectory,
        )

    async def final_record(self) -> bytes:
        """Return the record, once the last call has ended: its parts, each in a frame of its own, then its JSON."""
        await self.session.wait_idle()
        record = await self._record_so_far(has_rows=True)
        parts = {part.digest: part.frame for each in record["samples"] for part in each.get("parts", ())}
        for each in record["samples"]:
            if "parts" in each:
                each["parts"] = [part.digest for part in each["parts"]]
        is_good = record["samples"] or not record["failures"]
        self.session.trace.end(CAPPED if self.session.is_capped else "finished" if is_good else "failed")
        return join_samples([*parts.values(), encode(record)])

    async def given_up(self, ending: str) -> None:
        """End a rollout whose record is not needed, once its last call has ended."""
        await self.session.wait_idle()
        self.session.trace.end(ending, is_last=ending != RETRIED)

    async def record(self) -> dict[str, Any]:
        """Return the record so far, without parts and arrays; the policy's newest turn is in the last sample."""
        return await self._record_so_far(has_rows=False)

    async def _record_so_far(self, *, has_rows: bool) -> dict[str, Any]:
        await self.session.turns.drain()
        samples = await off_loop_if(self._has_rows, lambda: self._trajectory.samples(has_rows=has_rows))
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
        # Fixed length, because engines abort by prefix and "task-1" must not match the calls of "task-10".
        return f"{of_run}{sha256(body.rollout_id.encode()).hexdigest()[:16]}-"
    if not body.rid_prefix.startswith(of_run):
        raise InvalidInput(f"rid_prefix must begin with {of_run!r}", field="rid_prefix")
    return body.rid_prefix


@dataclass(frozen=True, slots=True)
class _Kept:
    content: bytes
    until_s: float


class ClosedRollouts:
    """The records of one run's closing and recently closed rollouts, as JSON.

    Callers that missed the reply ask again.
    """

    def __init__(self) -> None:
        self._closing: dict[str, asyncio.Task[bytes]] = {}
        self._kept: dict[str, _Kept] = {}
        """Oldest first."""
        self._num_bytes = 0

    def add(self, rollout_id: str, closing: "asyncio.Task[bytes]") -> None:
        """Add a closing rollout, whose task returns its record."""
        # Drop the record of an earlier rollout with this id, which would be returned instead.
        self.forget(rollout_id)
        self._closing[rollout_id] = closing
        closing.add_done_callback(lambda _: self._keep(rollout_id, closing))

    async def record(self, rollout_id: str) -> bytes | None:
        """Return the record once it is complete; None if the rollout is unknown or its record has expired."""
        closing = self._closing.get(rollout_id)
        if closing is not None:
            return await asyncio.shield(closing)  # this caller may disconnect, and another one may ask again
        self._trim()
        kept = self._kept.get(rollout_id)
        return kept.content if kept is not None else None

    def forget(self, rollout_id: str) -> None:
        """Drop the record, because a new rollout has the id."""
        self._closing.pop(rollout_id, None)
        self._drop(rollout_id)

    def _keep(self, rollout_id: str, closed: "asyncio.Task[bytes]") -> None:
        if self._closing.get(rollout_id) is not closed:  # reopened, and perhaps closed again, in the meantime
            return
        del self._closing[rollout_id]
        if closed.cancelled() or closed.exception() is not None:
            return  # nothing to keep: the waiting callers got the error
        self._kept[rollout_id] = _Kept(closed.result(), time.monotonic() + KEEP_S)
        self._num_bytes += len(closed.result())
        self._trim()

    def _trim(self) -> None:
        now_s = time.monotonic()
        while self._kept:
            oldest = next(iter(self._kept))
            # A single record may exceed the limit: it must still be available to a caller that asks again.
            is_too_much = self._num_bytes > MAX_BYTES and len(self._kept) > 1
            if not is_too_much and self._kept[oldest].until_s > now_s:
                return
            self._drop(oldest)

    def _drop(self, rollout_id: str) -> None:
        kept = self._kept.pop(rollout_id, None)
        if kept is not None:
            self._num_bytes -= len(kept.content)


class CappedRollouts:
    """The capped rollouts of a run, which the process that runs their agents polls together.

    They are numbered from 1 in the order in which they reached their caps. The numbers are kept in memory only: a
    restarted gateway counts from 1 again.
    """

    def __init__(self) -> None:
        self.num = 0
        """Number of capped rollouts so far."""
        self._names: deque[str] = deque(maxlen=MAX_NAMES)
        self._changed = Signal()

    def add(self, rollout_id: str) -> None:
        """Add a capped rollout."""
        self.num += 1
        self._names.append(rollout_id)
        self._changed.notify()

    async def after(self, number: int, limit_s: float) -> list[str]:
        """Return the rollouts capped after the first ``number``; waits up to ``limit_s`` seconds for one.

        Returns all of them if ``number`` is too large, because it was counted by an earlier gateway process.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while number == self.num:
                    await self._changed.wait(limit_s)
        num_new = self.num if number > self.num else self.num - number
        return list(islice(self._names, max(0, len(self._names) - num_new), None))
