"""Supervises the workers of a run in its lead: assigns rollouts to free ones and replaces those that die."""

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from forebay.core.child_process import last_line
from forebay.core.errors import InvalidInput
from forebay.core.tasks import TaskSet
from forebay.core.waiting import Signal
from forebay.generators.buffer_link.abc import WorkerReport
from forebay.workers.backends.abc import RunningWorker, close_all
from forebay.workers.members.worker_errors import PlacementFailed, WorkerError, WorkerLost
from forebay.workers.rollouts.orders import JobOrder, JobState, WorkerStatus, encode
from forebay.workers.rollouts.other_nodes import Address
from forebay.workers.rollouts.run_worker import RunWorker, awaited

logger = logging.getLogger(__name__)

StartWorker = Callable[[int], RunningWorker]
"""Starts the worker with this number."""
MAX_DEATHS = 2
"""After this many deaths of its workers, a rollout gets one last try, alone in a worker."""
MAX_FAILED_STARTS = 3
"""Failed starts in a row, for each worker of the run, after which the job fails."""
PLACE_AGAIN_S = 2.0
"""Delay before another attempt to place a worker on the cluster."""
REPORT_EVERY_S = 0.2
"""Interval between reports of a worker."""


class SupervisedJob(Protocol):
    """The job whose rollouts the workers run."""

    def order_for(self, number: int) -> JobOrder:
        """The order for the worker with this number."""

    def state(self) -> JobState:
        """Current state of the run."""

    def take(self, worker: RunWorker, report: WorkerStatus) -> None:
        """Handle a worker's report."""

    def note_unreached(self, worker: RunWorker, addresses: list[Address]) -> None:
        """Handle addresses that a worker does not reach."""

    def note_lost(self, worker: RunWorker) -> None:
        """Handle the loss of a worker and the rollouts that it had."""

    def note_no_worker(self, has_no_worker: bool) -> None:
        """Record whether the run has no ready worker at all."""

    def fail(self, error: BaseException) -> None:
        """Fail the job with this error."""


class WorkerSupervisor:
    """Starts workers with the first job, and replaces those that are gone while a job runs."""

    def __init__(self, start: StartWorker, num_workers: int) -> None:
        self._start = start
        self.num_workers = num_workers
        self.members: list[RunWorker] = []
        self.deaths: Counter[str] = Counter()
        """Deaths of workers that had the rollout in flight, by its uid."""
        self.last_reason = ""
        """Reason of the last death."""
        self._changed = Signal()
        self._num_failed_starts = 0
        self._job: SupervisedJob | None = None
        self._ended: list[dict[str, Any] | None] = []
        """Totals of the jobs that have ended."""
        self._tasks = TaskSet()

    # --- jobs

    def attach(self, job: SupervisedJob) -> None:
        """Begin a job, in the running event loop."""
        self._job, self._tasks = job, TaskSet()
        job.note_no_worker(True)
        if not self.members:
            self.members = [RunWorker(number) for number in range(self.num_workers)]
        for member in self.members:
            member.state = "starting"
            self._tasks.start(self._supervise(member))

    async def detach(self) -> None:
        """End supervision for this job."""
        self._job = None
        await self._tasks.cancel()

    def end_job(self, totals: dict[str, Any] | None) -> None:
        """Send the job's totals to the workers, whose user code then continues. Workers started later skip the job."""
        self._ended.append(totals)
        for member in self.members:
            if member.is_started:
                self._pass_ended(member)

    def close(self, drain_s: float) -> None:
        """End all workers, after ``drain_s`` at the latest."""
        close_all(self.members, drain_s, limit_s=drain_s + 1.0)

    def report(self) -> list[WorkerReport]:
        """Report of each worker."""
        return [member.state_report() for member in self.members]

    def send_all(self, method: str, *args: Any) -> None:
        """Call a method on each ready worker. A worker whose call fails is replaced."""
        for member in self.members:
            if member.state == "ready":
                self._send(member, method, *args)

    def _send(self, member: RunWorker, method: str, *args: Any) -> None:
        self._tasks.start(self._answered(member, member.send(method, *args)))

    async def _answered(self, member: RunWorker, sent: "Future[Any]") -> None:
        try:
            await awaited(sent)
        except Exception as error:  # noqa: BLE001 - any error means that the worker must be replaced
            self.note_lost(member, error)

    def _pass_ended(self, member: RunWorker) -> None:
        for number, totals in enumerate(self._ended[member.num_passed :], member.num_passed):
            member.send("end_job", number, totals)
        member.num_passed = len(self._ended)

    # --- slots

    async def take(self, uid: str, *, alone: bool, num_places: int) -> RunWorker:
        """Wait for a worker for one of ``num_places`` rollouts. ``alone``: no other rollout may run in it."""
        try:
            while (member := self._free(uid, alone=alone, num_places=num_places)) is None:
                await self._changed.wait()
        except asyncio.CancelledError:
            self._keep_free(uid)
            raise
        member.rollouts.add(uid)
        return member

    def release(self, member: RunWorker, uid: str) -> None:
        """Release the worker of a rollout that has ended."""
        member.rollouts.discard(uid)
        self._keep_free(uid)
        self._changed.notify()

    def _keep_free(self, uid: str) -> None:
        for member in self.members:
            if member.reserved_for == uid:
                member.reserved_for = None

    async def when_any_ready(self) -> None:
        """Wait until some worker takes rollouts."""
        while not any(member.state == "ready" for member in self.members):
            await self._changed.wait()

    def _free(self, uid: str, *, alone: bool, num_places: int) -> RunWorker | None:
        ready = [member for member in self.members if member.state == "ready"]
        mine = next((each for each in ready if each.reserved_for == uid), None)
        if mine is None:
            others = (each for each in ready if each.reserved_for is None)
            mine = min(others, key=lambda each: len(each.rollouts), default=None)
        if mine is None:
            return None
        if not alone:
            return None if self._is_first(mine, num_places) else mine
        mine.reserved_for = uid
        return None if mine.rollouts else mine

    def _is_first(self, member: RunWorker, num_places: int) -> bool:
        """Whether it already has its share while other workers are still starting for the first time.

        Without this limit the first ready worker would take every rollout, and rollouts never move.
        """
        share = -(-num_places // self.num_workers)
        are_coming = any(each.state == "starting" and not each.num_restarts for each in self.members)
        return are_coming and len(member.rollouts) >= share

    # --- life of workers

    async def _supervise(self, member: RunWorker) -> None:
        """Start a worker and have it take rollouts until the worker or the job ends."""
        try:
            if not member.is_started:
                member.begin(await self._started(member.number))
            await member.when_started()
            async with asyncio.TaskGroup() as serving:
                serving.create_task(member.watch())
                serving.create_task(self._serve(member))
        except PlacementFailed as error:
            await self._wait_place(member, str(error))
        except InvalidInput as error:  # such as a node with other versions: a new worker would fail, too
            self._fail(error)
        except ExceptionGroup as errors:
            self.note_lost(member, errors.exceptions[0])
        except Exception as error:  # noqa: BLE001 - any error of a start
            self.note_lost(member, error)

    async def _started(self, number: int) -> RunningWorker:
        start = _OneStart(self._start, number)
        try:
            return await asyncio.to_thread(start.run)
        except asyncio.CancelledError:  # the job is over: the next one starts another worker
            start.give_up()
            raise

    async def _serve(self, member: RunWorker) -> None:
        job = self._job
        assert job is not None
        self._pass_ended(member)
        order = job.order_for(member.number)
        unreached = await member.call("begin_job", encode(order))
        member.state, self._num_failed_starts = "ready", 0
        job.note_unreached(member, unreached)
        self._send(member, "set_state", encode(job.state()))  # it may have changed since the order
        job.note_no_worker(False)
        self._changed.notify()
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            job.take(member, await member.report())

    async def _wait_place(self, member: RunWorker, missing: str) -> None:
        """Log that the cluster has no room for the worker, and try again later."""
        member.state, member.reason = "unplaced", missing
        member.end()
        logger.warning("the cluster has no room for worker %d, which waits: %s", member.number, missing)
        self._changed.notify()  # the others take its share
        await asyncio.sleep(PLACE_AGAIN_S)
        member.state = "starting"
        self._tasks.start(self._supervise(member))

    def note_lost(self, member: RunWorker, error: BaseException) -> None:
        """Replace a worker that is gone or has failed."""
        if member.state == "lost":
            return
        is_start = member.state == "starting"
        reason = error.reason if isinstance(error, WorkerLost) else str(error)
        member.state, member.reason = "lost", reason
        self.last_reason = last_line(reason)
        logger.warning("worker %d is gone: %s", member.number, reason.rstrip())
        member.kill()
        self.deaths.update(member.rollouts)
        self._num_failed_starts += is_start
        if self._job is None:
            return
        self._job.note_lost(member)
        if not any(each.state == "ready" for each in self.members):
            self._job.note_no_worker(True)
        if self._num_failed_starts >= MAX_FAILED_STARTS * self.num_workers:
            self._fail(WorkerError(f"the run could not start any worker: {reason}"))
        else:
            new = RunWorker(member.number, member.num_restarts + 1, reason=last_line(reason))
            self.members[member.number] = new
            self._tasks.start(self._supervise(new))
        self._changed.notify()

    def _fail(self, error: BaseException) -> None:
        if self._job is not None:
            self._job.fail(error)


class _OneStart:
    """Starts a worker in a thread, which cannot be cancelled. After ``give_up`` the started worker is killed."""

    def __init__(self, start: StartWorker, number: int) -> None:
        self._start, self._number = start, number
        self._lock = threading.Lock()
        self._running: RunningWorker | None = None
        self._is_given_up = False

    def run(self) -> RunningWorker:
        running = self._start(self._number)
        with self._lock:
            self._running = running
        if self._is_given_up:
            running.kill()
        return running

    def give_up(self) -> None:
        with self._lock:
            self._is_given_up = True
        if self._running is not None:
            self._running.kill()
