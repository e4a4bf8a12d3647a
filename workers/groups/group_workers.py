"""The workers of one group: tracks idle, busy and lost ones, restarts them, and retries calls."""

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from forebay.core.errors import InvalidInput
from forebay.workers.backends.abc import RunningWorker, WorkerBackend, close_all
from forebay.workers.groups.call import one_error
from forebay.workers.members.worker_errors import WorkerError, WorkerLost
from forebay.workers.members.worker_spec import MethodCall, RemoteFailure, Vitals, WorkerSpec, failed_future

ChooseRank = Callable[[Collection[int]], int]
"""Chooses the worker of a call, given the ranks where the call has already failed."""
LostFn = Callable[[int, str], None]
"""Called with a rank and the reason, from any thread."""


class GroupWorkers:
    """Running workers by rank. All handles of one group, including those of roles, share one object."""

    def __init__(self, backend: WorkerBackend, specs: Sequence[WorkerSpec], workers: Sequence[RunningWorker]) -> None:
        self.backend = backend
        self.changed = threading.Condition()
        """Notified when a worker ends a call, is lost or restarted, or the group is closed."""
        self.is_closed = False
        self._specs = {spec.rank: spec for spec in specs}
        self._workers = dict(enumerate(workers))
        self._in_flight: dict[int, set[Future[Any]]] = {rank: set() for rank in self._workers}
        self._lost: dict[int, str] = {}
        self._notify: list[LostFn] = []
        self._replacing = {rank: threading.RLock() for rank in self._workers}
        """Serialises restarts of a worker: the second caller finds it restarted."""
        for rank, worker in self._workers.items():
            self._watch(rank, worker)

    @property
    def world_size(self) -> int:
        """Number of workers, including lost ones."""
        return len(self._workers)

    @property
    def vitals(self) -> Mapping[int, Vitals]:
        """Last vitals of each rank."""
        return {rank: worker.vitals for rank, worker in sorted(self._workers.items())}

    @property
    def lost(self) -> Mapping[int, str]:
        """Ranks that are lost and were not restarted, with the reasons."""
        with self.changed:
            return dict(self._lost)

    def wait_started(self) -> None:
        """Wait until the classes of all workers are constructed. Raises one error for all constructors that raised."""
        started = {rank: worker.started for rank, worker in self._workers.items()}
        wait(started.values())
        errors = {rank: error for rank, each in started.items() if (error := each.exception()) is not None}
        if errors:
            raise one_error("__init__", errors, self.world_size)

    def started(self, rank: int) -> "Future[None]":
        """Future that is done when the classes of this worker are constructed."""
        return self._workers[rank].started

    def on_lost(self, notify: LostFn) -> None:
        """Call ``notify`` for each worker that is lost, including those that are restarted."""
        with self.changed:
            self._notify.append(notify)
            lost = dict(self._lost)
        for rank, reason in lost.items():
            notify(rank, reason)

    def send(self, rank: int, call: MethodCall) -> "Future[Any]":
        """Run a call on one worker, once its classes are constructed."""
        with self.changed:
            worker = self._workers[rank]
            if self.is_closed:
                return failed_future(WorkerError(f"{call.method} was not called: the group is closed"))
            if rank in self._lost:
                # A worker that never started fails with the error of its constructor.
                return failed_future(_refusal(worker) or WorkerLost(rank, self._lost[rank]))
        future = worker.call(call)
        with self.changed:
            self._in_flight[rank].add(future)
        # The first callback, so that a retry already finds the worker marked as lost.
        future.add_done_callback(partial(self._ended, rank, worker))
        return future

    def least_busy(self, without: Collection[int] = ()) -> int:
        """The rank with the fewest calls in flight; one of ``without`` only if no other is alive."""
        with self.changed:
            ranks = [rank for rank in self._workers if rank not in self._lost] or list(self._workers)
            ranks = [rank for rank in ranks if rank not in without] or ranks
            return min(ranks, key=lambda rank: len(self._in_flight[rank]))

    def is_idle(self, rank: int) -> bool:
        """Whether a worker is alive, started and has no call in flight. The caller must hold ``changed``."""
        return rank not in self._lost and not self._in_flight[rank] and self._workers[rank].started.done()

    def replace(self, rank: int) -> "Future[None]":
        """End this worker if it is alive and start a new one. The future is done when its classes are constructed."""
        with self._replacing[rank]:
            with self.changed:
                if self.is_closed:
                    raise WorkerError(f"worker {rank} cannot be restarted: the group is closed")
                before = self._workers[rank]
                self._lost.setdefault(rank, "it is being restarted")
            before.kill()
            (worker,) = self.backend.start([self._specs[rank]])
            self._enter(rank, worker)
        self._watch(rank, worker)
        return worker.started

    def revive(self, rank: int, limit_s: float | None) -> None:
        """Restart this worker if it is lost, and wait until it is ready. Raises ``TimeoutError``."""
        with self._replacing[rank]:
            started = self.replace(rank) if rank in self.lost else self._workers[rank].started
        started.result(limit_s)

    def close(self, drain_s: float) -> None:
        """Refuse new calls, wait up to ``drain_s`` for those in flight, then end all workers concurrently."""
        until_s = time.monotonic() + drain_s
        with self.changed:
            if self.is_closed:
                return
            self.is_closed = True
            self.changed.notify_all()
        try:
            with self.changed:
                self.changed.wait_for(lambda: not any(self._in_flight.values()), drain_s)
        except BaseException:  # Ctrl-C: nothing could close them later
            until_s = 0.0
            raise
        finally:
            close_all(self._workers.values(), max(until_s - time.monotonic(), 0.0))

    def _ended(self, rank: int, worker: RunningWorker, future: "Future[Any]") -> None:
        with self.changed:
            self._in_flight[rank].discard(future)
            self.changed.notify_all()
        if not future.cancelled() and isinstance(error := future.exception(), WorkerLost):
            self._note_lost(rank, worker, error.reason)

    def _enter(self, rank: int, worker: RunningWorker) -> None:
        with self.changed:
            self._workers[rank] = worker
            self._lost.pop(rank, None)
            self.changed.notify_all()
            came_late = self.is_closed
        if came_late:
            worker.kill()

    def _watch(self, rank: int, worker: RunningWorker) -> None:
        worker.on_lost(partial(self._note_lost, rank, worker))
        worker.started.add_done_callback(partial(self._note_started, rank, worker))

    def _note_started(self, rank: int, worker: RunningWorker, started: "Future[None]") -> None:
        if started.exception() is not None:
            self._note_lost(rank, worker, "its classes could not be constructed")
        with self.changed:
            self.changed.notify_all()

    def _note_lost(self, rank: int, worker: RunningWorker, reason: str) -> None:
        with self.changed:
            if self.is_closed or self._workers[rank] is not worker or rank in self._lost:
                return
            self._lost[rank] = reason
            self.changed.notify_all()
            notify = list(self._notify)
        for each in notify:
            # Not in this thread, which must end the worker's other calls: ``notify`` may close the group.
            threading.Thread(target=each, args=(rank, reason), name="worker group loss", daemon=True).start()


class RepeatedCall:
    """Sends a call, retries it where allowed, and reports its outcome."""

    def __init__(self, workers: GroupWorkers, call: MethodCall, *, choose: ChooseRank, retries: int) -> None:
        self.outcome: Future[Any] = Future()
        self.rank = -1
        """The rank where it ran last."""
        self._workers, self._call, self._choose, self._left = workers, call, choose, retries
        self._failed_on: list[int] = []
        self._inner: Future[Any] | None = None
        self._until_s = None if call.deadline_s is None else time.monotonic() + call.deadline_s
        self._send()
        self.outcome.add_done_callback(self._cancelled)

    @property
    def _left_s(self) -> float | None:
        return None if self._until_s is None else max(self._until_s - time.monotonic(), 0.0)

    def _send(self) -> None:
        self.rank = self._choose(self._failed_on)
        if self.rank in self._failed_on:
            self._workers.revive(self.rank, self._left_s)
        self._inner = self._workers.send(self.rank, replace(self._call, deadline_s=self._left_s))
        self._inner.add_done_callback(self._ended)
        self._cancelled(self.outcome)

    def _ended(self, inner: "Future[Any]") -> None:
        error = None if inner.cancelled() else inner.exception()
        if error is not None and self._left > 0 and self._may_repeat(error):
            self._left -= 1
            self._failed_on.append(self.rank)
            # Restarting a worker takes time, and this thread receives the replies of other calls.
            threading.Thread(target=self._again, args=(error,), name="worker group retry", daemon=True).start()
            return
        with suppress(Exception):  # it has already ended: late or cancelled
            if inner.cancelled():
                self.outcome.cancel()
            elif isinstance(error, TimeoutError):
                self.outcome.set_exception(self._call.late())
            elif error is not None:
                self.outcome.set_exception(error)
            else:
                self.outcome.set_result(inner.result())

    def _again(self, error: BaseException) -> None:
        try:
            if not self.outcome.done():
                self._send()
        except Exception as refused:  # noqa: BLE001 - passed to the caller, like any failure of the call
            with suppress(Exception):  # already cancelled
                self.outcome.set_exception(self._call.late() if isinstance(refused, TimeoutError) else refused)
        if isinstance(error, WorkerLost):  # even if another worker has the call now, this one is still missing
            with suppress(Exception):  # the next call of this worker reports it
                self._workers.revive(error.rank, None)

    def _may_repeat(self, error: BaseException) -> bool:
        if self.outcome.done() or self._workers.is_closed:
            return False
        if isinstance(error, RemoteFailure):
            return not isinstance(error.error, InvalidInput)
        return isinstance(error, WorkerLost)

    def _cancelled(self, outcome: "Future[Any]") -> None:
        if outcome.cancelled() and self._inner is not None:
            self._inner.cancel()


def _refusal(worker: RunningWorker) -> BaseException | None:
    return worker.started.exception() if worker.started.done() else None
