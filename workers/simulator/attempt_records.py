"""The tracer of a simulated run, which keeps only the summary of each attempt."""

import asyncio
from typing import Any

from forebay.core.scheduling.policy import RolloutKey
from forebay.telemetry.tracing.records import RolloutSummary
from forebay.telemetry.tracing.tracer import AttemptTrace, NoAttempt, Tracer, TraceSettings

SECOND_NS = 1_000_000_000


class SimulatedRollout(RolloutSummary):
    """Summary of one attempt, by the clock of the run, with facts that only a simulation has."""

    lost: int = 0
    """Tokens sampled by engines that failed before they answered; not included in ``sampled``."""
    preemptions: int = 0
    cap: int | None = None
    """Most tokens that it might sample."""
    chosen: int = 0
    """Position in the order in which all attempts began, from 1."""
    trained_step: int | None = None
    """The step that trained on its sample."""


class AttemptRecord(NoAttempt):
    """One attempt. The modelled runner records the work of its engines in ``rollout``."""

    def __init__(self, records: "AttemptRecords", rollout: SimulatedRollout) -> None:
        # The base class's attributes are not set: nothing here needs them.
        self.rollout = rollout
        self._records = records
        self._is_written = False

    def note_started(self) -> None:
        """Record that it has an engine."""
        self.rollout.started = self._records.now()

    def summary(self, *, until: int | None = None, **fields: Any) -> RolloutSummary:
        """End the attempt; returns its summary."""
        if not self._is_written:
            self._is_written = True
            fields["started"] = self.rollout.started
            for name, value in fields.items():
                setattr(self.rollout, name, value)
            self._records.add(self.rollout, until or self._records.now())
        return self.rollout


class AttemptRecords(Tracer):
    """Attempts of one run, in the order in which they ended."""

    def __init__(self, run_id: str) -> None:
        super().__init__(TraceSettings(folder="", run_id=run_id, max_bytes=0), "run")
        self.rollouts: list[SimulatedRollout] = []
        self._num_chosen = 0
        self._time = asyncio.get_running_loop().time
        self._used: dict[RolloutKey, SimulatedRollout] = {}

    def now(self) -> int:
        """Time of the event loop in nanoseconds; never 0, which means no time."""
        return int(self._time() * SECOND_NS) or 1

    def attempt(
        self,
        uid: str,
        group: str,
        attempt: int,
        begun: int | None = None,
        id: str = "",  # noqa: A002, ARG002 - signature of the base class
    ) -> AttemptTrace:
        self._num_chosen += 1
        rollout = SimulatedRollout(
            t=begun or self.now(),
            d=0,
            id=str(self._num_chosen),
            uid=uid,
            group=group,
            instance="",
            attempt=attempt,
            chosen=self._num_chosen,
        )
        return AttemptRecord(self, rollout)

    def add(self, rollout: SimulatedRollout, end: int) -> None:
        """Add an attempt that has ended."""
        rollout.d = end - rollout.t
        rollout.started = rollout.started or rollout.end  # closed before it had an engine
        self.rollouts.append(rollout)
        if rollout.ending in ("finished", "failed"):
            self._used[RolloutKey(rollout.group, rollout.number)] = rollout

    def trained(self, group: str, numbers: tuple[int, ...], step: int) -> None:
        """Record that a step trained on these rollouts of a group."""
        for number in numbers:
            if (rollout := self._used.pop(RolloutKey(group, number), None)) is not None:
                rollout.trained_step = step
