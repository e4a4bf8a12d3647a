"""One job of the lead: what its parts are where workers run the rollouts, and who hears what these report."""

import asyncio
from collections.abc import Sequence

from forebay.client.sample_writer.outbox import Sample
from forebay.core.tasks import TaskSet
from forebay.generators.buffer_link.abc import RunGone
from forebay.generators.job.ports import JobPlaces, JobSurroundings
from forebay.generators.rollouts.rollout_trace import RolloutTrace, RolloutTraces
from forebay.workers.members.worker_errors import WorkerError
from forebay.workers.rollouts.orders import JobOrder, JobState, WorkerStatus, encode
from forebay.workers.rollouts.reach import Address, out_of_reach, refusal
from forebay.workers.rollouts.remote_engines import RemoteEngines
from forebay.workers.rollouts.remote_rollout import RemoteRollout
from forebay.workers.rollouts.remote_runner import RemoteRunner, RemoteWriter
from forebay.workers.rollouts.remote_traces import RemoteTracer
from forebay.workers.rollouts.run_worker import RunWorker
from forebay.workers.rollouts.supervisor import WorkerSupervisor


class RemoteJob:
    """A ``SupervisedJob``: the ``number``-th of its run.

    All workers have to reach the ``addresses``, as far as this process does.
    """

    def __init__(
        self, around: JobSurroundings, workers: WorkerSupervisor, number: int, addresses: Sequence[Address]
    ) -> None:
        self._around, self._workers, self._number = around, workers, number
        self._addresses = list(addresses)
        self._tasks = TaskSet()
        self._rollouts: dict[str, RemoteRollout] = {}
        self._sent: JobState | None = None
        self._is_state_due = False
        traces = RolloutTraces(RemoteTracer(around.tracer), around.plan.run_id)
        traces.on_end = self._note_over
        own = around.link.writer(around.queue_size, self._note_own_judged)
        self._runner = RemoteRunner(around, workers, self._rollouts, own)
        # One more is being offered, as in a writer's own queue.
        self._writer = RemoteWriter(own, self._rollouts, self._runner, around.queue_size + 1, traces.note_judged)
        self._engines = RemoteEngines(around.ring, self._rollouts, self._send_state)
        self.places = JobPlaces(self._engines, self._runner, self._writer, traces)
        """What the job has of it."""
        around.reporter.watch_workers(workers.report)
        around.hold.on_news = around.clock.on_change = self._note_state

    async def close(self) -> None:
        """The job is over."""
        self._around.hold.on_news = self._around.clock.on_change = lambda: None
        await self._tasks.cancel()
        await self._runner.close()
        await self._writer.stop()

    def _note_own_judged(self, sample: Sample) -> None:
        self._writer.note_judged(sample)

    def _note_over(self, trace: RolloutTrace) -> None:
        rollout = self._rollouts.pop(trace.uid, None)
        if rollout is not None:
            self._runner.drop(rollout, trace.ending)

    # --- the state of the run

    def order_for(self, number: int) -> JobOrder:
        """Of ``SupervisedJob``, as all below."""
        plan = self._around.plan
        return JobOrder(
            number=self._number,
            run_id=plan.run_id,
            group_size=plan.group_size,
            group_timeout_s=plan.group_timeout_s,
            group_deadline_s=plan.group_deadline_s,
            captures=plan.captures,
            queue_size=self._share(self._around.queue_size, number),
            num_reward_workers=self._share(self._around.num_reward_workers, number),
            addresses=self._addresses,
            state=self.state(),
        )

    def _share(self, total: int, number: int) -> int:
        """What a worker has of something of which the run has so many; at least 1."""
        each, rest = divmod(total, self._workers.num_workers)
        return max(1, each + (number < rest))

    def state(self) -> JobState:
        hold, clock = self._around.hold, self._around.clock
        return JobState(hold.is_held, hold.is_paused, hold.step, clock.is_running, self._engines.weights)

    def _note_state(self) -> None:
        # Several things change at once as a rule: they are sent together.
        if not self._is_state_due:
            self._is_state_due = True
            asyncio.get_running_loop().call_soon(self._send_state)

    def _send_state(self) -> None:
        self._is_state_due = False
        if (state := self.state()) != self._sent:
            self._sent = state
            self._workers.send_all("set_state", encode(state))

    # --- what becomes of workers

    def note_lost(self, worker: RunWorker) -> None:
        self._around.reporter.note_waiting(False, worker.number)
        for rollout in self._rollouts.values():
            if rollout.worker is worker:
                rollout.worker = None

    def note_no_worker(self, has_no_worker: bool) -> None:
        self._around.reporter.note_no_worker(has_no_worker)

    def fail(self, error: BaseException) -> None:
        self._writer.fail(error)

    def note_unreached(self, worker: RunWorker, addresses: list[Address]) -> None:
        for address in addresses:
            self._tasks.start(self._check_reach(worker, address))

    async def _check_reach(self, worker: RunWorker, address: Address) -> None:
        # What this machine does not reach either may be back soon: an engine that starts again.
        if not await out_of_reach([address]):
            self.fail(refusal(address, f"the workers on {worker.state_report().node}"))

    def take(self, worker: RunWorker, report: WorkerStatus) -> None:
        for uid, (engine, attempt) in report.moves.items():
            rollout = self._rollouts.get(uid)
            if rollout is not None and rollout.worker is worker:
                rollout.note_moved(engine, attempt)
        for url, is_failing in report.servers:
            self._around.ring.note_server(url, is_failing=is_failing)
        if report.waits_for_engine != worker.waits_for_engine:
            worker.waits_for_engine = report.waits_for_engine
            self._around.reporter.note_waiting(report.waits_for_engine, worker.number)
        if report.failure:
            self.fail(RunGone(report.failure) if report.is_gone else WorkerError(report.failure))
