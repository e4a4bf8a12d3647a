"""The workers of a run as its lead has them: which of them is free, and another one in place of each that is gone."""

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
"""Starts the worker of a number."""
MAX_DEATHS = 2
"""A rollout that was in flight at so many deaths runs once more, alone in its worker."""
MAX_FAILED_STARTS = 3
"""So many workers in a row may end before they take their first rollout."""
PLACE_AGAIN_S = 2.0
"""After which it is looked again whether a cluster has room for a worker."""
REPORT_EVERY_S = 0.2
"""So often each worker is asked for a report."""


class SupervisedJob(Protocol):
    """The job that the workers take rollouts of."""

    def order_for(self, number: int) -> JobOrder:
        """What the worker of this number is to know of it."""

    def state(self) -> JobState:
        """How the run is now."""

    def take(self, worker: RunWorker, report: WorkerStatus) -> None:
        """A worker has reported."""

    def note_unreached(self, worker: RunWorker, addresses: list[Address]) -> None:
        """A worker does not reach these."""

    def note_lost(self, worker: RunWorker) -> None:
        """A worker is gone, with what it had."""

    def note_no_worker(self, has_no_worker: bool) -> None:
        """There is no worker at all, or there is one again."""

    def fail(self, error: BaseException) -> None:
        """It cannot go on."""


class WorkerSupervisor:
    """Starts workers with the first job, and others for those that are gone, as long as a job goes on."""

    def __init__(self, start: StartWorker, num_workers: int) -> None:
        self._start = start
        self.num_workers = num_workers
        self.members: list[RunWorker] = []
        self.deaths: Counter[str] = Counter()
        """How often the worker of a rollout in flight has died, by uid."""
        self.last_reason = ""
        """Why the last one did."""
        self._changed = Signal()
        self._num_failed_starts = 0
        self._job: SupervisedJob | None = None
        self._ended: list[dict[str, Any] | None] = []
        """The totals of the jobs before."""
        self._tasks = TaskSet()

    # --- jobs

    def attach(self, job: SupervisedJob) -> None:
        """A job begins, in the running event loop."""
        self._job, self._tasks = job, TaskSet()
        job.note_no_worker(True)
        if not self.members:
            self.members = [RunWorker(number) for number in range(self.num_workers)]
        for member in self.members:
            member.state = "starting"
            self._tasks.start(self._supervise(member))

    async def detach(self) -> None:
        """It is over."""
        self._job = None
        await self._tasks.cancel()

    def end_job(self, totals: dict[str, Any] | None) -> None:
        """What stands behind the job is run in the workers too; those that come later pass it at once."""
        self._ended.append(totals)
        for member in self.members:
            if member.is_started:
                self._pass_ended(member)

    def close(self, drain_s: float) -> None:
        """End all of them, after ``drain_s`` at the latest."""
        close_all(self.members, drain_s, limit_s=drain_s + 1.0)

    def report(self) -> list[WorkerReport]:
        """How each of them is."""
        return [member.state_report() for member in self.members]

    def send_all(self, method: str, *args: Any) -> None:
        """Call this at each worker that takes rollouts; one that cannot be called is replaced."""
        for member in self.members:
            if member.state == "ready":
                self._send(member, method, *args)

    def _send(self, member: RunWorker, method: str, *args: Any) -> None:
        self._tasks.start(self._answered(member, member.send(method, *args)))

    async def _answered(self, member: RunWorker, sent: "Future[Any]") -> None:
        try:
            await awaited(sent)
        except Exception as error:  # noqa: BLE001 - whatever keeps a worker from doing its work
            self.note_lost(member, error)

    def _pass_ended(self, member: RunWorker) -> None:
        for number, totals in enumerate(self._ended[member.num_passed :], member.num_passed):
            member.send("end_job", number, totals)
        member.num_passed = len(self._ended)

    # --- places

    async def take(self, uid: str, *, alone: bool, num_places: int) -> RunWorker:
        """A worker for one of ``num_places`` rollouts; ``alone``: with no other in it. Waits for one."""
        try:
            while (member := self._free(uid, alone=alone, num_places=num_places)) is None:
                await self._changed.wait()
        except asyncio.CancelledError:
            self._keep_free(uid)
            raise
        member.rollouts.add(uid)
        return member

    def release(self, member: RunWorker, uid: str) -> None:
        """A rollout is not in flight any more."""
        member.rollouts.discard(uid)
        self._keep_free(uid)
        self._changed.notify()

    def _keep_free(self, uid: str) -> None:
        for member in self.members:
            if member.reserved_for == uid:
                member.reserved_for = None

    async def when_any_ready(self) -> None:
        """Return when some worker takes rollouts."""
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
        """Whether it has its share already, and the others have yet to come up for the first time.

        Else the first one to be ready would take everything, and long rollouts stay where they have begun.
        """
        share = -(-num_places // self.num_workers)
        are_coming = any(each.state == "starting" and not each.num_restarts for each in self.members)
        return are_coming and len(member.rollouts) >= share

    # --- what becomes of workers

    async def _supervise(self, member: RunWorker) -> None:
        """Start a worker, and have it take rollouts until it or the job is over."""
        try:
            if not member.is_started:
                member.begin(await self._started(member.number))
            await member.when_started()
            async with asyncio.TaskGroup() as serving:
                serving.create_task(member.watch())
                serving.create_task(self._serve(member))
        except PlacementFailed as error:
            await self._wait_place(member, str(error))
        except InvalidInput as error:  # as a node with other versions: no other worker would do better
            self._fail(error)
        except ExceptionGroup as errors:
            self.note_lost(member, errors.exceptions[0])
        except Exception as error:  # noqa: BLE001 - whatever keeps a worker from being started
            self.note_lost(member, error)

    async def _started(self, number: int) -> RunningWorker:
        start = _OneStart(self._start, number)
        try:
            return await asyncio.to_thread(start.run)
        except asyncio.CancelledError:  # the job is over: the next one starts another
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
        self._send(member, "set_state", encode(job.state()))  # it may have changed meanwhile
        job.note_no_worker(False)
        self._changed.notify()
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            job.take(member, await member.report())

    async def _wait_place(self, member: RunWorker, missing: str) -> None:
        """The cluster has no room for it: say so, and try again."""
        member.state, member.reason = "unplaced", missing
        member.end()
        logger.warning("worker %d waits for a place: %s", member.number, missing)
        self._changed.notify()  # its share is for the others
        await asyncio.sleep(PLACE_AGAIN_S)
        member.state = "starting"
        self._tasks.start(self._supervise(member))

    def note_lost(self, member: RunWorker, error: BaseException) -> None:
        """It is gone, or has failed: another one takes its place."""
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
            self._fail(WorkerError(f"no worker of the run can be started: {reason}"))
        else:
            new = RunWorker(member.number, member.num_restarts + 1, reason=last_line(reason))
            self.members[member.number] = new
            self._tasks.start(self._supervise(new))
        self._changed.notify()

    def _fail(self, error: BaseException) -> None:
        if self._job is not None:
            self._job.fail(error)


class _OneStart:
    """Starts a worker in a thread, which cannot be stopped: one that nobody waits for any more is ended again."""

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
