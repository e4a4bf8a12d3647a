"""The worker's side of a process: its classes, the thread of their event loop, and calls of their methods."""

import asyncio
import inspect
import os
import resource
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from types import MappingProxyType
from typing import Any

from forebay.telemetry.tracing.stall_watch import StallWatch
from forebay.workers.members.worker import Worker
from forebay.workers.members.worker_errors import WorkerError
from forebay.workers.members.worker_spec import MethodCall, RemoteFailure, Vitals, WorkerSpec, failed_future

RunInTurn = Callable[[Callable[[], None]], None]
"""Runs a function after all those passed earlier, in one dedicated thread, or at once in the caller's thread."""


class WorkerHost:
    """Constructs the classes of one ``WorkerSpec`` and runs calls on them.

    ``async`` methods run concurrently on an event loop in its own thread, others through ``run_in_turn``. Thread-safe.
    """

    def __init__(self, spec: WorkerSpec, node: str, run_in_turn: RunInTurn) -> None:
        self._spec, self._node, self._run_in_turn = spec, node, run_in_turn
        self._workers: dict[str, Worker] = {}
        self._loop = LoopThread(f"worker {spec.rank} loop")
        self._lock = threading.Lock()
        self._running: set[Future[Any]] = set()
        self._is_closed = False

    def make(self) -> None:
        """Construct the classes in this thread. Raises ``RemoteFailure`` with what a constructor raised."""
        spec = self._spec
        others: dict[str, dict[str, Worker]] = {role: {} for role in spec.classes}
        for role, each in spec.classes.items():
            try:
                worker = each.make(
                    rank=spec.rank,
                    world_size=spec.world_size,
                    local_rank=spec.local_rank,
                    local_world_size=spec.local_world_size,
                    node=self._node,
                    roles=MappingProxyType(others[role]),
                )
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # the controller gets SystemExit, too
                raise RemoteFailure.of(error) from error
            self._workers[role] = worker
            for other in others.keys() - {role}:
                others[other][role] = worker

    def call(self, call: MethodCall) -> "Future[Any]":
        """Run one call.

        The future fails with ``RemoteFailure``, or with ``TimeoutError`` after the deadline (for a method that is not
        ``async``, once the method has ended). Cancelling it cancels an ``async`` method, and drops a queued one.
        """
        try:
            function = self._function(call)
        except (AttributeError, LookupError, WorkerError) as error:
            return failed_future(RemoteFailure.of(error))
        is_async = inspect.iscoroutinefunction(function)
        with self._lock:
            if self._is_closed:
                return failed_future(WorkerError(f"worker {self._spec.rank} takes no more calls: its group was closed"))
            if is_async:
                work = _awaited(function, call)
                future = asyncio.run_coroutine_threadsafe(work, self._loop.loop)
            else:
                future = Future()
            self._running.add(future)
        future.add_done_callback(self._forget)
        if not is_async:
            until_s = None if call.deadline_s is None else time.monotonic() + call.deadline_s
            self._run_in_turn(partial(_run, future, function, call, until_s))
        return future

    @property
    def vitals(self) -> Vitals:
        """Current vitals. Must not be read in the thread of the event loop."""
        blocked_s, line = self._loop.watch.blocked()
        return Vitals(self._node, os.getpid(), rss_bytes(), blocked_s=blocked_s, blocked_at=line)

    def close(self, drain_s: float) -> None:
        """Refuse new calls, wait up to ``drain_s`` for accepted ones, then cancel ``async`` calls that are left."""
        with self._lock:
            self._is_closed = True
            running: Sequence[Future[Any]] = tuple(self._running)
        wait(running, drain_s)
        for future in running:
            future.cancel()
        self._loop.stop()

    def _forget(self, future: "Future[Any]") -> None:
        with self._lock:
            self._running.discard(future)

    def _function(self, call: MethodCall) -> Callable[..., Any]:
        try:
            worker = self._workers[call.role]
        except KeyError:
            raise WorkerError(f"worker {self._spec.rank} has no role {call.role!r}") from None
        # ``function`` is the class attribute that the group bound; a property is never evaluated.
        return partial(call.function, worker) if call.function is not None else getattr(worker, call.method)


class LoopThread:
    """Runs an event loop in a daemon thread until it is stopped."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.watch = StallWatch()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def stop(self, wait_s: float = 1.0) -> None:
        """Cancel what still runs in the loop and end the thread, waiting up to ``wait_s`` for both."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(wait_s)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.call_soon(self.watch.start)
        self.loop.run_forever()
        self.watch.stop()
        running = asyncio.all_tasks(self.loop)
        for task in running:
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*running, return_exceptions=True))
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()


async def _awaited(function: Callable[..., Awaitable[Any]], call: MethodCall) -> Any:
    timeout = asyncio.timeout(call.deadline_s)
    task = asyncio.current_task()
    try:
        async with timeout:
            return await function(*call.args, **call.kwargs)
    except TimeoutError as error:
        if timeout.expired():
            raise call.late() from None
        raise RemoteFailure.of(error) from error
    except asyncio.CancelledError as error:
        if task is not None and task.cancelling():
            raise
        raise RemoteFailure.of(error) from error
    except BaseException as error:  # SystemExit would end the loop and all other calls
        raise RemoteFailure.of(error) from error


def _run(future: "Future[Any]", function: Callable[..., Any], call: MethodCall, until_s: float | None) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        if until_s is not None and time.monotonic() >= until_s:
            raise call.late()
        result = function(*call.args, **call.kwargs)
    except BaseException as error:  # SystemExit would end the worker and all other calls
        is_late = until_s is not None and time.monotonic() >= until_s
        future.set_exception(call.late() if is_late else RemoteFailure.of(error))
        if isinstance(error, KeyboardInterrupt):  # Ctrl-C is meant for the whole process
            raise
    else:
        is_late = until_s is not None and time.monotonic() >= until_s
        future.set_exception(call.late()) if is_late else future.set_result(result)


def rss_bytes() -> int:
    """Resident memory of this process; its peak where the system is not Linux."""
    try:
        with open("/proc/self/statm", "rb") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except FileNotFoundError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
