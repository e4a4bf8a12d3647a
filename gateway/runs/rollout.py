"""A rollout that an agent executes: its key, its session, and the record of its calls."""

import asyncio
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

from forebay.core.clock import ActiveClock
from forebay.core.errors import InvalidInput
from forebay.core.ids import run_rid_prefix
from forebay.engines.capture.trajectory import Trajectory
from forebay.engines.capture.turn import Turn
from forebay.engines.ring import EngineRing
from forebay.gateway.request_bodies import OpenRollout
from forebay.gateway.runs.run_trace import SessionTrace
from forebay.gateway.runs.sessions import Affinity, Session, TurnLog
from forebay.web.replies import encode

ABORTED, RETRIED, CAPPED = "aborted", "retried", "broken"
"""How a rollout ends whose record nobody wants: for good, because another attempt began, or at its cap."""


class OpenedRollout:
    """Between the opening of a rollout and its close."""

    def __init__(
        self, run_id: str, body: OpenRollout, key: str, ring: EngineRing, clock: ActiveClock, trace: SessionTrace
    ) -> None:
        """Raises ``InvalidInput`` for a ``rid_prefix`` by which other runs' calls might be aborted."""
        self.run_id = run_id
        self.rollout_id = body.rollout_id
        self.key = key
        self.expiry: asyncio.TimerHandle | None = None
        """When it is forgotten if nobody closes it."""
        self._notices = ring.notices
        self._trajectory = Trajectory(body.rollout_id)
        self.session = Session(
            Affinity(ring, body.engine_url),
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
