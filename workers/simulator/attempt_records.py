"""The tracer of a simulated run: of each attempt it keeps the summary, and nothing else."""

import asyncio
from typing import Any

from forebay.core.scheduling.policy import RolloutKey
from forebay.telemetry.tracing.no_trace import NoAttempt
from forebay.telemetry.tracing.records import RolloutSummary
from forebay.telemetry.tracing.tracer import AttemptTrace, Tracer, TraceSettings

SECOND_NS = 1_000_000_000


class SimulatedRollout(RolloutSummary):
    """The summary of one attempt, by the clock of the run, and what only a simulation knows of it."""

    lost: int = 0
    """Sampled by engines that were gone before they answered; not among those that were ``sampled``."""
    preemptions: int = 0
    cap: int | None = None
    """What it might sample."""
    chosen: int = 0
    """How many attempts had been begun when it was, itself included."""
    trained_step: int | None = None
    """The step that has trained on its sample."""


class AttemptRecord(NoAttempt):
    """One attempt. What its engines did is noted in ``rollout`` by the model of its runner."""

    def __init__(self, records: "AttemptRecords", rollout: SimulatedRollout) -> None:
        # Not those of its base: nothing is kept that they would be needed for.
        self.rollout = rollout
        self._records = records
        self._is_written = False

    def note_started(self) -> None:
        """It has an engine."""
        self.rollout.started = self._records.now()

    def summary(self, *, until: int | None = None, **fields: Any) -> RolloutSummary:
        """The attempt has ended."""
        if not self._is_written:
            self._is_written = True
            fields["started"] = self.rollout.started
            for name, value in fields.items():
                setattr(self.rollout, name, value)
            self._records.add(self.rollout, until or self._records.now())
        return self.rollout


class AttemptRecords(Tracer):
    """Those of one run, in the order in which they ended."""

    def __init__(self, run_id: str) -> None:
        super().__init__(TraceSettings(folder="", run_id=run_id, max_bytes=0), "run")
        self.rollouts: list[SimulatedRollout] = []
        self._num_chosen = 0
        self._time = asyncio.get_running_loop().time
        self._used: dict[RolloutKey, SimulatedRollout] = {}

    def now(self) -> int:
        """Of the event loop, in nanoseconds. Not 0, which stands for none."""
        return int(self._time() * SECOND_NS) or 1

    def attempt(
        self,
        uid: str,
        group: str,
        attempt: int,
        begun: int | None = None,
        id: str = "",  # noqa: A002, ARG002 - as its base has it
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
        """One has ended."""
        rollout.d = end - rollout.t
        rollout.started = rollout.started or rollout.end  # closed before it had an engine
        self.rollouts.append(rollout)
        if rollout.ending in ("finished", "failed"):
            self._used[RolloutKey(rollout.group, rollout.number)] = rollout

    def trained(self, group: str, numbers: tuple[int, ...], step: int) -> None:
        """A step has trained on these rollouts of a group."""
        for number in numbers:
            if (rollout := self._used.pop(RolloutKey(group, number), None)) is not None:
                rollout.trained_step = step
