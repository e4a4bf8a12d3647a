"""One rollout in a worker: in a group of its own, as the lead alone knows the others, and what the lead hears of it."""

import asyncio
import threading
from collections.abc import Sequence
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
from forebay.workers.rollouts.orders import Done, Order, TraceLines, WorkerStatus


class WorkerChanges:
    """What a worker reports next. Any thread may add to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = _new_status()

    def take(self) -> WorkerStatus:
        """What is new since the last call, and what still holds."""
        with self._lock:
            report, self._next = self._next, _new_status()
            self._next.waits_for_engine = report.waits_for_engine
        return report

    def note_moved(self, uid: str, engine: str | None, attempt: int) -> None:
        """A rollout talks to this engine now, or to none."""
        with self._lock:
            self._next.moves[uid] = engine, attempt

    def note_server(self, url: str, is_failing: bool) -> None:
        """An engine does not answer, or does again."""
        with self._lock:
            self._next.servers.append((url, is_failing))

    def note_waiting(self, is_waiting: bool) -> None:
        """Whether rollouts here wait because no engine answers."""
        with self._lock:
            self._next.waits_for_engine = is_waiting

    def note_failure(self, message: str, *, is_gone: bool) -> None:
        """The worker cannot go on with its job."""
        with self._lock:
            self._next.failure, self._next.is_gone = message, is_gone

    def note_trace(self, lines: TraceLines) -> None:
        """Lines of the trace, for the lead to write."""
        with self._lock:
            self._next.trace.append(lines)


def _new_status() -> WorkerStatus:
    return WorkerStatus({}, [], False, 0.0, "", False, "", [])


class MemberSeat(Seat):
    """A place that the lead counts: it is told where the rollout is."""

    def __init__(self, order: Order, group: str, trace: RolloutTrace, changes: WorkerChanges) -> None:
        super().__init__(NextRollout(RolloutKey(group, order.number), order.engine, order.cap_tokens), EngineLoads(1))
        self._uid, self._trace, self._changes = order.uid, trace, changes
        self._noted: tuple[str | None, int] = (order.engine, order.attempt)

    def move(self, url: str | None) -> None:
        """It runs on another engine now, or on none."""
        place = (url, self._trace.num_attempts - 1)
        if self._noted != place:
            self._noted = place
            self._changes.note_moved(self._uid, *place)


@dataclass
class MemberRollout:
    """One that this worker runs, or whose samples wait here for their slot."""

    order: Order
    group: OpenGroup
    trace: RolloutTrace
    seat: MemberSeat
    samples: list[Sample] = field(default_factory=list)
    is_running: bool = True
    judged: "asyncio.Future[None] | None" = None
    """Done when its samples are on the buffer's disk, once they have a slot."""

    @property
    def executions(self) -> Sequence[Execution]:
        """Its attempts here."""
        return self.group.rollouts.get(self.order.number, ())

    def done(self, status: str) -> Done:
        """What the lead is told of its end."""
        executions = self.executions
        is_completed = bool(executions) and status == "completed"
        return Done(
            status=status,  # type: ignore[arg-type]
            tokens=[each.num_sampled_tokens for each in executions],
            counters=dict(executions[-1].trajectory.counters) if is_completed else {},
            error=self.samples[-1]["error"]["message"] if status == "failed" else "",
        )


def begin_rollout(
    order: Order, plan: Plan, traces: RolloutTraces, clock: ActiveClock, hold: Hold, changes: WorkerChanges
) -> MemberRollout:
    """The rollout that the lead asks for; its time has begun there."""
    row = parse_row(order.row, order.row_number)
    planned = GroupPlan(row, order.epoch, (order.number,), (order.number,))
    # What is left to it is an age: both limits of a group count from there.
    age_s = max(0.0, plan.group_deadline_s - order.left_s)
    group = OpenGroup(plan, planned, clock, hold, age_s=age_s)
    group.enter()
    now = traces.tracer.now()
    waits = Waits(traces.tracer)
    waits.begun = now - order.lasted
    trace = traces.begin(planned, order.number, hold.step, waits, order.attempt)
    trace.attempt.know_as(order.span)
    for name, after, lasted in order.waits:
        trace.attempt.add(name, now - order.lasted + after, lasted)
    return MemberRollout(order, group, trace, MemberSeat(order, planned.group_id, trace, changes))
