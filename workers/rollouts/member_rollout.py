"""One rollout in a worker: in a group of its own, as the lead alone knows the others, and in a place of the lead's."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from forebay.client.sample_writer.outbox import Sample
from forebay.core.clock import ActiveClock
from forebay.core.scheduling.engine_loads import EngineLoads
from forebay.core.scheduling.policy import NextRollout, RolloutKey
from forebay.core.task_row import parse_row
from forebay.generators.buffer_link.abc import Plan
from forebay.generators.rollouts.open_group import Execution, GroupPlan, Hold, OpenGroup
from forebay.generators.rollouts.rollout_trace import RolloutTrace, RolloutTraces, Waits
from forebay.generators.rollouts.seat import Seat
from forebay.workers.rollouts.messages import Assignment, RolloutDone, RolloutMoved, ToLead


class MemberSeat(Seat):
    """A place that the lead counts: it is told where the rollout is."""

    def __init__(self, assignment: Assignment, group: str, trace: RolloutTrace, post: Callable[[ToLead], None]) -> None:
        rollout = RolloutKey(group, assignment.number)
        super().__init__(NextRollout(rollout, assignment.engine, assignment.cap_tokens), EngineLoads(1))
        self._uid, self._trace, self._post = assignment.uid, trace, post
        self._noted: tuple[str | None, int] = (assignment.engine, assignment.attempt)

    def move(self, url: str | None) -> None:
        """It runs on another engine now, or on none."""
        place = (url, self._trace.num_attempts - 1)
        if self._noted != place:
            self._noted = place
            self._post(RolloutMoved(self._uid, *place))


@dataclass
class MemberRollout:
    """One that this worker runs, or whose samples wait here for their slot."""

    assignment: Assignment
    group: OpenGroup
    trace: RolloutTrace
    seat: MemberSeat
    begun_s: float
    samples: list[Sample] = field(default_factory=list)
    is_running: bool = True
    is_granted: bool = False
    is_ended: bool = False
    """The lead needs it no more."""

    @property
    def executions(self) -> Sequence[Execution]:
        """Its attempts here."""
        return self.group.rollouts.get(self.assignment.number, ())

    def done(self, status: str) -> RolloutDone:
        """What the lead is told of its end."""
        executions = self.executions
        last = executions[-1] if executions else None
        error = self.samples[-1]["error"]["message"] if status == "failed" else ""
        return RolloutDone(
            uid=self.assignment.uid,
            status=status,  # type: ignore[arg-type]
            tokens=[each.num_sampled_tokens for each in executions],
            counters=dict(last.trajectory.counters) if last is not None and status == "completed" else {},
            error=error,
            num_turns=int(getattr(last, "num_turns", 0)),
            seconds=time.monotonic() - self.begun_s,
            num_bytes=_num_bytes(self.samples),
        )


def begin_rollout(
    assignment: Assignment,
    plan: Plan,
    traces: RolloutTraces,
    clock: ActiveClock,
    hold: Hold,
    post: Callable[[ToLead], None],
) -> MemberRollout:
    """The rollout that the lead asks for; its time has begun there."""
    row = parse_row(assignment.row, assignment.row_number)
    planned = GroupPlan(row, assignment.epoch, (assignment.number,), (assignment.number,))
    # What is left to it is an age: both limits of a group count from there.
    age_s = max(0.0, plan.group_deadline_s - assignment.left_s)
    group = OpenGroup(plan, planned, clock, hold, age_s=age_s)
    group.enter()
    now = traces.tracer.now()
    waits = Waits(traces.tracer)
    waits.begun = now - assignment.lasted
    trace = traces.begin(planned, assignment.number, hold.step, waits, assignment.attempt)
    trace.attempt.know_as(assignment.span)
    for name, after, lasted in assignment.waits:
        trace.attempt.add(name, now - assignment.lasted + after, lasted)
    seat = MemberSeat(assignment, planned.group_id, trace, post)
    return MemberRollout(assignment, group, trace, seat, time.monotonic())


def _num_bytes(samples: Sequence[Sample]) -> int:
    """Of what their messages say."""
    contents = (message.get("content") for sample in samples for message in sample.get("messages", ()))
    return sum(len(content) for content in contents if isinstance(content, str))
