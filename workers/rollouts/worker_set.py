"""The workers of a run as its lead has them: which of them is free, and another one in place of each that is gone."""

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from forebay.core.child_process import last_line
from forebay.core.errors import InvalidInput
from forebay.core.waiting import Signal
from forebay.generators.buffer_link.abc import WorkerReport
from forebay.workers.backends.abc import RunningWorker, close_all
from forebay.workers.members.worker_errors import PlacementFailed, WorkerError
from forebay.workers.rollouts.messages import JobReady, ToLead, ToWorker
from forebay.workers.rollouts.placed_worker import PlacedWorker
from forebay.workers.rollouts.worker_line import WorkerLine

logger = logging.getLogger(__name__)

StartWorker = Callable[[int], RunningWorker]
"""Starts the worker of a number."""
MAX_DEATHS = 2
"""A rollout that was in flight at so many deaths runs once more, alone in its worker."""
MAX_FAILED_STARTS = 3
"""So many workers in a row may end before they take their first rollout."""
PLACE_AGAIN_S = 2.0
"""After which it is looked again whether a cluster has room for a worker."""


class WorkerSetJob(Protocol):
    """The job that the workers take rollouts of."""

    def greeting(self, number: int) -> Sequence[ToWorker]:
        """What the worker of this number is sent that comes in the middle of it."""

    def take(self, member: PlacedWorker, message: ToLead) -> None:
        """A worker has sent this."""

    def note_lost(self, member: PlacedWorker) -> None:
        """A worker is gone, with what it had."""

    def note_no_worker(self, has_no_worker: bool) -> None:
        """There is no worker at all, or there is one again."""

    def fail(self, error: BaseException) -> None:
        """It cannot go on."""


class WorkerSet:
    """Starts workers with the first job, and others for those that are gone, as long as a job goes on."""

    def __init__(self, start: StartWorker, num_workers: int) -> None:
        self._start = start
        self.num_workers = num_workers
        self.members: list[PlacedWorker] = []
        self.deaths: Counter[str] = Counter()
        """How often the worker of a rollout in flight has died, by uid."""
        self.last_reason = ""
        """Why the last one did."""
        self.news = Signal()
        self._num_failed_starts = 0
        self._lock = threading.Lock()
        self._waiting: list[Callable[[], None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._job: WorkerSetJob | None = None
        self._starts: set[asyncio.Task[None]] = set()

    # --- jobs

    def attach(self, job: WorkerSetJob) -> None:
        """A job begins, in the running event loop."""
        self._job = job
        before = list(self.members)
        with self._lock:
            self._loop = asyncio.get_running_loop()
            waiting, self._waiting = self._waiting, []
        job.note_no_worker(True)
        for work in waiting:  # some of them may have died since the job before
            work()
        for member in before:
            if self.members[member.number] is member:
                self._join(member)
        if not before:
            self.members = [PlacedWorker(number) for number in range(self.num_workers)]
            for member in self.members:
                self._begin(member)

    def _join(self, member: PlacedWorker) -> None:
        """One of the job before takes part in this one."""
        if member.state == "lost":
            self._replace(member)
        elif member.line is None:  # that was over before it had started
            self._begin(member)
        else:
            member.state = "starting"
            self._greet(member)

    def detach(self) -> None:
        """It is over."""
        with self._lock:
            self._loop = None
        self._job = None
        for task in self._starts:
            task.cancel()

    def broadcast(self, message: ToWorker) -> None:
        """Send one to every worker."""
        for member in self.members:
            member.send(message)

    def close(self, drain_s: float) -> None:
        """End all of them, after ``drain_s`` at the latest."""
        lines = [member.line for member in self.members if member.line is not None and member.state != "lost"]
        close_all(lines, drain_s, limit_s=drain_s + 1.0)

    def report(self) -> list[WorkerReport]:
        """How each of them is."""
        return [member.report() for member in self.members]

    # --- places

    async def take(self, uid: str, *, alone: bool, num_places: int) -> PlacedWorker:
        """A worker for one of ``num_places`` rollouts; ``alone``: with no other in it. Waits for one."""
        try:
            while (member := self._free(uid, alone=alone, num_places=num_places)) is None:
                await self.news.wait()
        except asyncio.CancelledError:
            self._keep_free(uid)
            raise
        member.rollouts.add(uid)
        return member

    def release(self, member: PlacedWorker, uid: str) -> None:
        """A rollout is not in flight any more."""
        member.rollouts.discard(uid)
        self._keep_free(uid)
        self.news.notify()

    def _keep_free(self, uid: str) -> None:
        for member in self.members:
            if member.reserved_for == uid:
                member.reserved_for = None

    async def when_any_ready(self) -> None:
        """Return when some worker takes rollouts."""
        while not any(member.state == "ready" for member in self.members):
            await self.news.wait()

    def _free(self, uid: str, *, alone: bool, num_places: int) -> PlacedWorker | None:
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

    def _is_first(self, member: PlacedWorker, num_places: int) -> bool:
        """Whether it has its share already, and the others have yet to come up for the first time.

        Else the first one to be ready would take everything, and long rollouts stay where they have begun.
        """
        share = -(-num_places // self.num_workers)
        are_coming = any(each.state == "starting" and not each.num_restarts for each in self.members)
        return are_coming and len(member.rollouts) >= share

    # --- what becomes of workers

    def _begin(self, member: PlacedWorker) -> None:
        self._start_task(self._begun(member))

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._starts.add(task)
        task.add_done_callback(self._starts.discard)

    async def _begun(self, member: PlacedWorker) -> None:
        start = _OneStart(self._start, member.number)
        try:
            running = await asyncio.to_thread(start.run)
        except asyncio.CancelledError:  # the job is over: the next one starts another
            start.give_up()
            raise
        except PlacementFailed as error:
            await self._wait_place(member, str(error))
            return
        except Exception as error:  # noqa: BLE001 - whatever keeps a worker from being started
            self._note_lost(member, f"{type(error).__name__}: {error}")
            return
        member.line = WorkerLine(
            running,
            lambda messages: self._in_loop(lambda: self._take(member, messages)),
            lambda reason, error: self._in_loop(lambda: self._note_end(member, reason, error)),
        )
        self._greet(member)

    def _note_end(self, member: PlacedWorker, reason: str, error: BaseException | None) -> None:
        if self._job is None or not isinstance(error, PlacementFailed | InvalidInput):
            self._note_lost(member, reason)
        elif isinstance(error, PlacementFailed):
            self._start_task(self._wait_place(member, reason))
        else:  # as a node with other versions: no other worker would do better
            self._job.fail(error)

    async def _wait_place(self, member: PlacedWorker, missing: str) -> None:
        """The cluster has no room for it: say so, and try again."""
        member.state, member.reason, member.line = "unplaced", missing, None
        logger.warning("worker %d waits for a place: %s", member.number, missing)
        self.news.notify()  # its share is for the others
        await asyncio.sleep(PLACE_AGAIN_S)
        member.state = "starting"
        self._begin(member)

    def _greet(self, member: PlacedWorker) -> None:
        if self._job is not None:
            for message in self._job.greeting(member.number):
                member.send(message)

    def _in_loop(self, work: Callable[[], None]) -> None:
        with self._lock:
            if self._loop is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(work)
            else:
                self._waiting.append(work)

    def _take(self, member: PlacedWorker, messages: Sequence[ToLead]) -> None:
        if member.state == "lost" or self._job is None:
            return
        for message in messages:
            if isinstance(message, JobReady):
                self._note_ready(member)
            self._job.take(member, message)

    def _note_ready(self, member: PlacedWorker) -> None:
        member.state, self._num_failed_starts = "ready", 0
        if self._job is not None:
            self._job.note_no_worker(False)
        self.news.notify()

    def _note_lost(self, member: PlacedWorker, reason: str) -> None:
        if member.state == "lost":
            return
        is_start = member.state == "starting"
        member.state, member.reason = "lost", reason
        self.last_reason = last_line(reason)
        logger.warning("worker %d is gone: %s", member.number, reason.rstrip())
        if member.line is not None:
            member.line.kill()
        self.deaths.update(member.rollouts)
        self._num_failed_starts += is_start
        if self._job is None:
            return
        self._job.note_lost(member)
        if not any(each.state == "ready" for each in self.members):
            self._job.note_no_worker(True)
        if self._num_failed_starts >= MAX_FAILED_STARTS * self.num_workers:
            self._job.fail(WorkerError(f"no worker of the run can be started: {reason}"))
        else:
            self._replace(member)
        self.news.notify()

    def _replace(self, member: PlacedWorker) -> None:
        new = PlacedWorker(member.number, member.num_restarts + 1, reason=last_line(member.reason))
        self.members[member.number] = new
        self._begin(new)


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
