"""The tracer of a simulated run: of each attempt it keeps what a summary says, and nothing else."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from forebay.core.scheduling.policy import RolloutKey
from forebay.telemetry.tracing.records import RolloutSummary
from forebay.telemetry.tracing.tracer import NO_SPAN, AttemptTrace, SpanHandle, Tracer, TraceSettings
from forebay.workers.simulator.simulated_records import SimulatedRollout

SECOND_NS = 1_000_000_000


class AttemptRecord(AttemptTrace):
    """One attempt. What its engine did is noted here by the model of its rollout."""

    def __init__(self, records: "AttemptRecords", group: str, attempt: int, begun: int, chosen: int) -> None:
        # Not those of its base: nothing is kept that they would be needed for.
        self.begun = begun
        self.group = group
        self.attempt = attempt
        self.chosen = chosen
        self.started_s = -1.0
        self.engine = ""
        self.prompt = self.cached = self.sampled = self.lost = self.num_preemptions = 0
        self.reward: float | None = None
        self.cap: int | None = None
        self._records = records
        self._is_written = False

    def span(self, *_: Any, **__: Any) -> SpanHandle:
        """Nothing, as all below."""
        return NO_SPAN

    def begin(self, *_: Any, **__: Any) -> SpanHandle:
        return NO_SPAN

    def add(self, *_: Any, **__: Any) -> None:
        pass

    def phases(self, until: int | None = None) -> dict[str, int]:  # noqa: ARG002 - there are none
        return {}

    @contextmanager
    def activate(self) -> Iterator[None]:
        yield

    def summary(self, *, until: int | None = None, **fields: Any) -> RolloutSummary:
        """The attempt has ended."""
        if not self._is_written:
            self._is_written = True
            self._records.add(self, fields, (until or self._records.now()) / SECOND_NS)
        return _NO_SUMMARY


_NO_SUMMARY = RolloutSummary(t=0, d=0, id="", uid="", group="", instance="")


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
        uid: str,  # noqa: ARG002 - its summary has all of its parts
        group: str,
        attempt: int,
        begun: int | None = None,
        id: str = "",  # noqa: A002, ARG002 - as its base has it
    ) -> AttemptTrace:
        self._num_chosen += 1
        return AttemptRecord(self, group, attempt, begun or self.now(), self._num_chosen)

    def add(self, record: AttemptRecord, fields: dict[str, Any], ended_s: float) -> None:
        """One has ended."""
        ending, number = fields["ending"], fields["number"]
        if record.started_s < 0:  # closed before it had an engine
            record.started_s = ended_s
        rollout = SimulatedRollout(
            instance=fields["instance"],
            epoch=fields["epoch"],
            number=number,
            slot=fields["slot"],
            attempt=record.attempt,
            step=fields["step"],
            engine=record.engine,
            ending=ending,
            submitted_s=record.begun / SECOND_NS,
            started_s=record.started_s,
            ended_s=ended_s,
            prompt=record.prompt,
            cached=record.cached,
            sampled=record.sampled,
            reward=record.reward,
            lost=record.lost,
            preemptions=record.num_preemptions,
            cap=record.cap,
            chosen=record.chosen,
        )
        self.rollouts.append(rollout)
        if ending in ("finished", "failed"):
            self._used[RolloutKey(record.group, number)] = rollout

    def trained(self, group: str, numbers: tuple[int, ...], step: int) -> None:
        """A step has trained on these rollouts of a group."""
        for number in numbers:
            if (rollout := self._used.pop(RolloutKey(group, number), None)) is not None:
                rollout.trained_step = step
