"""One job of the lead: its engines and writer when workers run the rollouts, and the handling of their reports."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from forebay.client.sample_writer.outbox import Sample
from forebay.client.sample_writer.writer import AsyncWriter
from forebay.core.tasks import TaskSet
from forebay.core.waiting import Signal
from forebay.core.weight_versions import AnnouncedWeights
from forebay.engines.abc import EngineLoad
from forebay.engines.pool import Call, EnginePool
from forebay.generators.buffer_link.abc import RunGone
from forebay.generators.job.ports import JobContext, JobPlaces
from forebay.generators.rollouts.rollout_trace import RolloutTrace, RolloutTraces
from forebay.workers.members.worker_errors import WorkerError
from forebay.workers.rollouts.orders import JobOrder, JobState, WorkerStatus, encode
from forebay.workers.rollouts.other_nodes import Address, out_of_reach, refusal
from forebay.workers.rollouts.remote_runner import RemoteRollout, RemoteRunner, uids_of
from forebay.workers.rollouts.remote_traces import RemoteTracer
from forebay.workers.rollouts.run_worker import RunWorker
from forebay.workers.rollouts.supervisor import WorkerSupervisor

STOP_S = 7.0
"""Longest wait for the workers' replies to ``stop``. Each worker has its own, shorter limit."""


class RemoteEngines:
    """Replaces a job's ``EnginePool``. ``on_state`` sends the state of the run to the workers at once."""

    def __init__(self, pool: EnginePool, rollouts: dict[str, RemoteRollout], on_state: Callable[[], None]) -> None:
        self._pool, self._rollouts, self._on_state = pool, rollouts, on_state
        self.weights: AnnouncedWeights | None = None
        self._tasks = TaskSet()

    def announce(self, weights: AnnouncedWeights | None) -> None:
        """Set new weights, sent with the state of the run. Implements ``JobEngines``, like all methods below."""
        self.weights = weights
        self._pool.announce(weights)

    async def when_up(self) -> Sequence[str]:
        return await self._pool.when_up()

    async def load_at(self, url: str) -> EngineLoad | None:
        return await self._pool.load_at(url)

    async def abort(self, rid_prefix: str, calls: Iterable[Call] = ()) -> None:  # noqa: ARG002 - the workers end theirs
        await self._pool.abort(rid_prefix)

    async def stop(self, calls: Callable[[], Iterable[Call]], limit_s: float | None = STOP_S) -> None:
        self._on_state()  # workers must know before whether the run is held
        uids, are_over = uids_of(list(calls()))
        by_worker: dict[RunWorker, list[str]] = {}
        for uid in uids:
            if (rollout := self._rollouts.get(uid)) is not None and rollout.worker is not None:
                by_worker.setdefault(rollout.worker, []).append(uid)
        answers = [self._tasks.start(self._stop(worker, some, are_over)) for worker, some in by_worker.items()]
        if answers:
            await asyncio.wait(answers, timeout=limit_s)

    async def _stop(self, worker: RunWorker, uids: list[str], are_over: bool) -> None:
        with suppress(Exception):  # a worker that is gone does not answer
            tokens: dict[str, int] = await worker.call("stop", uids, are_over)
            for uid, number in tokens.items():
                if (rollout := self._rollouts.get(uid)) is not None:
                    rollout.note_tokens(number)


class RemoteWriter:
    """Replaces a job's ``AsyncWriter``: workers send their samples, and ``own`` sends those that no worker has.

    Up to ``max_waiting`` samples are in transit. ``on_judged`` is called for each that is on the disk or was refused.
    """

    def __init__(
        self,
        own: AsyncWriter,
        rollouts: dict[str, RemoteRollout],
        runner: RemoteRunner,
        max_waiting: int,
        on_judged: Callable[[Sample], None],
    ) -> None:
        self._own, self._rollouts, self._runner, self._max_waiting = own, rollouts, runner, max_waiting
        self._on_judged = on_judged
        self._on_way: set[str] = set()
        self._changed = Signal()
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks = TaskSet()

    async def write(self, sample: Sample) -> None:
        """Deliver a sample. Implements ``JobWriter``, like the methods below."""
        rollout = self._rollouts.get(sample["uid"])
        if rollout is None or "messages" in sample:
            await self._own.write(sample)
            return
        while len(self._on_way) >= self._max_waiting:
            await self._changed.wait()
        self._on_way.add(rollout.uid)
        rollout.slot = sample["slot"]
        self._tasks.start(self._deliver(rollout, sample["slot"]))

    async def watch(self) -> None:
        own = asyncio.ensure_future(self._own.watch())
        try:
            await asyncio.wait((own, self._failure), return_when=asyncio.FIRST_COMPLETED)
            for each in (own, self._failure):
                if each.done():
                    each.result()
        finally:
            own.cancel()

    async def close(self) -> None:
        while self._on_way:
            await self._changed.wait()
        await self._own.close()

    async def stop(self) -> None:
        """End at once; undelivered samples are dropped."""
        await self._tasks.cancel()
        await self._own.stop()

    async def _deliver(self, rollout: RemoteRollout, slot: int) -> None:
        if await self._runner.deliver(rollout, slot):
            self.note_judged({"uid": rollout.uid})

    def note_judged(self, sample: Sample) -> None:
        """Record that the sample of a rollout is on the disk or was refused."""
        self._on_way.discard(sample["uid"])
        self._changed.notify()
        self._on_judged(sample)

    def fail(self, error: BaseException) -> None:
        """Make ``watch`` raise this error."""
        if not self._failure.done():
            self._failure.set_exception(error)
            self._failure.exception()  # marks it as retrieved: a job that has already ended never awaits it


class RemoteJob:
    """A ``SupervisedJob``: the ``number``-th of its run.

    All workers must reach those of the ``addresses`` that this process reaches.
    """

    def __init__(
        self, around: JobContext, workers: WorkerSupervisor, number: int, addresses: Sequence[Address]
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
        # Plus the sample being offered, as in a writer's own queue.
        self._writer = RemoteWriter(own, self._rollouts, self._runner, around.queue_size + 1, traces.note_judged)
        self._engines = RemoteEngines(around.pool, self._rollouts, self._send_state)
        self.places = JobPlaces(self._engines, self._runner, self._writer, traces)
        """The parts that the job uses."""
        around.reporter.watch_workers(workers.report)
        around.hold.on_news = around.clock.on_change = self._note_state

    async def close(self) -> None:
        """Stop the runner and the writer."""
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
        """The job's order for one worker. Implements ``SupervisedJob``, like all methods below."""
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
            defers_groups=plan.oversampling is not None and plan.oversampling.begun_per_step is not None,
        )

    def _share(self, total: int, number: int) -> int:
        """One worker's share of the run's ``total``; at least 1."""
        each, rest = divmod(total, self._workers.num_workers)
        return max(1, each + (number < rest))

    def state(self) -> JobState:
        hold, clock = self._around.hold, self._around.clock
        return JobState(hold.is_held, hold.is_paused, hold.step, clock.is_running, self._engines.weights)

    def _note_state(self) -> None:
        # Changes usually come in groups: they are sent together.
        if not self._is_state_due:
            self._is_state_due = True
            asyncio.get_running_loop().call_soon(self._send_state)

    def _send_state(self) -> None:
        self._is_state_due = False
        if (state := self.state()) != self._sent:
            self._sent = state
            self._workers.send_all("set_state", encode(state))

    # --- state of workers

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
        # An address that this machine does not reach either may return soon, such as a restarting engine.
        if not await out_of_reach([address]):
            self.fail(refusal(address, f"the workers on {worker.state_report().node}"))

    def take(self, worker: RunWorker, report: WorkerStatus) -> None:
        for uid, (engine, attempt) in report.moves.items():
            rollout = self._rollouts.get(uid)
            if rollout is not None and rollout.worker is worker:
                rollout.note_moved(engine, attempt)
        for url, is_failing in report.servers:
            self._around.pool.note_server(url, is_failing=is_failing)
        if report.waits_for_engine != worker.waits_for_engine:
            worker.waits_for_engine = report.waits_for_engine
            self._around.reporter.note_waiting(report.waits_for_engine, worker.number)
        if report.failure:
            self.fail(RunGone(report.failure) if report.is_gone else WorkerError(report.failure))
