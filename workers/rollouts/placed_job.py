"""One job of the lead: what its parts are where workers run the rollouts, and who is told what these say."""

import asyncio
import logging
from collections.abc import Sequence

from forebay.client.sample_writer.outbox import Sample
from forebay.generators.buffer_link.abc import RunGone
from forebay.generators.job.places import JobPlaces, JobSurroundings
from forebay.generators.rollouts.rollout_trace import RolloutTrace, RolloutTraces
from forebay.workers.members.worker_errors import WorkerError
from forebay.workers.rollouts.messages import (
    BeginJob,
    CallsStopped,
    EngineChanged,
    EnginesAnswer,
    JobBroken,
    LeadState,
    LoopBlocked,
    OutOfReach,
    RolloutDone,
    RolloutMoved,
    SampleJudged,
    ToLead,
    ToWorker,
)
from forebay.workers.rollouts.placed_engines import PlacedEngines
from forebay.workers.rollouts.placed_rollout import PlacedRollout
from forebay.workers.rollouts.placed_runner import PlacedRunner
from forebay.workers.rollouts.placed_traces import PlacedTracer
from forebay.workers.rollouts.placed_worker import PlacedWorker
from forebay.workers.rollouts.placed_writer import PlacedWriter
from forebay.workers.rollouts.reach import Address, out_of_reach, refusal
from forebay.workers.rollouts.worker_set import WorkerSet

logger = logging.getLogger(__name__)


class PlacedJob:
    """A ``WorkerSetJob``. The job's number is ``number``; workers that come to it have passed those ``earlier``.

    All of them have to reach the ``addresses``, as far as this process does.
    """

    def __init__(
        self,
        around: JobSurroundings,
        workers: WorkerSet,
        number: int,
        earlier: Sequence[ToWorker],
        addresses: Sequence[Address],
    ) -> None:
        self._around, self._workers, self._number, self._earlier = around, workers, number, earlier
        self._addresses = list(addresses)
        self._checks: set[asyncio.Task[None]] = set()
        self._rollouts: dict[str, PlacedRollout] = {}
        self._sent: LeadState | None = None
        self._is_state_due = False
        traces = RolloutTraces(PlacedTracer(around.tracer), around.plan.run_id)
        traces.on_end = self._note_over
        self._own = around.link.writer(around.queue_size, self._note_own_judged)
        self._runner = PlacedRunner(around, workers, self._rollouts, self._own)
        # One more is being offered, as in a writer's own queue.
        self._writer = PlacedWriter(self._own, self._rollouts, self._runner.grant, around.queue_size + 1)
        self._engines = PlacedEngines(around.ring, workers, self._rollouts, self._send_state)
        self.places = JobPlaces(self._engines, self._runner, self._writer, traces)
        """What the job has of it."""
        around.reporter.watch_workers(workers.report)
        around.hold.on_news = around.clock.on_change = self._note_state

    async def close(self) -> None:
        """The job is over."""
        self._around.hold.on_news = self._around.clock.on_change = lambda: None
        for check in self._checks:
            check.cancel()
        await self._runner.close()
        await self._own.stop()

    def _note_own_judged(self, sample: Sample) -> None:
        self._writer.note_judged(sample["uid"])
        self.places.traces.note_judged(sample)

    def _note_over(self, trace: RolloutTrace) -> None:
        placed = self._rollouts.pop(trace.uid, None)
        if placed is not None:
            self._runner.end(placed, trace.ending)

    # --- the state of the run

    def greeting(self, number: int) -> Sequence[ToWorker]:
        """Of ``WorkerSetJob``, as all below."""
        plan = self._around.plan
        begin = BeginJob(
            number=self._number,
            run_id=plan.run_id,
            group_size=plan.group_size,
            group_timeout_s=plan.group_timeout_s,
            group_deadline_s=plan.group_deadline_s,
            captures=plan.captures,
            queue_size=self._share(self._around.queue_size, number),
            num_reward_workers=self._share(self._around.num_reward_workers, number),
            addresses=self._addresses,
            state=self._state(),
        )
        return [*self._earlier, begin]

    def _share(self, total: int, number: int) -> int:
        """What a worker has of something of which the run has so many; at least 1."""
        each, rest = divmod(total, self._workers.num_workers)
        return max(1, each + (number < rest))

    def _state(self) -> LeadState:
        hold, clock = self._around.hold, self._around.clock
        return LeadState(hold.is_held, hold.is_paused, hold.step, clock.is_running, self._engines.weights)

    def _note_state(self) -> None:
        # Several things change at once as a rule: they are sent together.
        if not self._is_state_due:
            self._is_state_due = True
            asyncio.get_running_loop().call_soon(self._send_state)

    def _send_state(self) -> None:
        self._is_state_due = False
        if (state := self._state()) != self._sent:
            self._sent = state
            self._workers.broadcast(state)

    # --- what becomes of workers

    def note_lost(self, member: PlacedWorker) -> None:
        self._around.reporter.note_waiting(False, member.number)
        self._engines.note_lost(member)
        self._runner.note_lost(member)

    def note_no_worker(self, has_no_worker: bool) -> None:
        self._around.reporter.note_no_worker(has_no_worker)

    def fail(self, error: BaseException) -> None:
        self._writer.fail(error)

    def take(self, member: PlacedWorker, message: ToLead) -> None:
        match message:
            case RolloutMoved() | RolloutDone() | SampleJudged():
                placed = self._rollouts.get(message.uid)
                if placed is not None and placed.member is member:
                    self._take_of(placed, message)
            case CallsStopped():
                self._engines.note_stopped(message)
            case EnginesAnswer():
                self._around.reporter.note_waiting(message.is_waiting, member.number)
            case EngineChanged():
                self._around.ring.note_server(message.url, is_failing=message.is_failing)
            case LoopBlocked():
                member.blocked_s, member.blocked_at = message.seconds, message.line
            case OutOfReach():
                self._check_reach(member, message.address)
            case JobBroken():
                self.fail(RunGone(message.message) if message.is_gone else WorkerError(message.message))
            case _:
                logger.debug("worker %d: %r", member.number, message)

    def _check_reach(self, member: PlacedWorker, address: Address) -> None:
        """What this machine does not reach either may be back soon: an engine that starts again."""

        async def check() -> None:
            if not await out_of_reach([address]):
                self.fail(refusal(address, f"the workers on {member.report().node}"))

        task = asyncio.get_running_loop().create_task(check())
        self._checks.add(task)
        task.add_done_callback(self._checks.discard)

    def _take_of(self, placed: PlacedRollout, message: RolloutMoved | RolloutDone | SampleJudged) -> None:
        match message:
            case RolloutMoved():
                self._runner.note_moved(placed, message)
            case RolloutDone():
                placed.note_done(message)
            case SampleJudged():
                self._writer.note_judged(placed.uid)
                self.places.traces.note_judged({"uid": placed.uid})
