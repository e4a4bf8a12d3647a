"""Rewards: runs reward functions with a time limit, ``async`` ones in the event loop and others in processes.

Jobs use ``Rewarder``. Code above ``_serve`` runs in the run process; ``_serve`` and the code below it run in the
process of a reward function.
"""

import asyncio
import inspect
import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from typing import Any, Self, cast

from forebay.core.errors import InvalidInput
from forebay.core.outcome import finite_number, read_reward_parts
from forebay.telemetry.tracing.tracer import NO_ATTEMPT, AttemptTrace

START_TIMEOUT_S = 180.0
"""A worker first imports the module of its function, which may import torch."""
TOTAL = "reward"
"""Key of the total in a mapping that a reward function returns; the other keys name its parts."""
Reward = float | Mapping[str, float]
RewardFunc = Callable[[dict[str, Any]], Reward | Awaitable[Reward]]


@dataclass(frozen=True)
class RewardOutcome:
    """A reward, or why there is none: ``kind`` names the error, ``message`` holds its text."""

    reward: float | None = None
    kind: str = ""
    message: str = ""
    traceback: str = ""
    wall_s: float | None = None
    """Wall-clock time of the function."""
    cpu_s: float | None = None
    """CPU time of the function's process; None if the process also does other work, or died."""
    parts: dict[str, float] = field(default_factory=dict)
    """Named parts of the reward, if the function returns them."""


class Rewarder:
    """Computes rewards with a reward function. Enter it with ``async with``.

    An ``async`` function is awaited. Any other function runs in one of up to ``num_workers`` processes, because it may
    hang in code that only a kill can stop. After ``timeout_s`` seconds, its process is killed and replaced.

    Raises ``InvalidInput`` for a function that cannot be sent to another process.
    """

    def __init__(self, function: RewardFunc, *, timeout_s: float, num_workers: int) -> None:
        self._function = function
        self._timeout_s = timeout_s
        self._is_async = is_async(function)
        count = 0 if self._is_async else max(1, min(num_workers, os.cpu_count() or 1))
        pickled = b"" if self._is_async else _pickled(function)
        self._workers = [RewardWorker(pickled, timeout_s) for _ in range(count)]
        self._idle: asyncio.Queue[RewardWorker] = asyncio.Queue()
        self._threads = ThreadPoolExecutor(max(1, count), thread_name_prefix="reward")

    async def __aenter__(self) -> Self:
        # Last in, first out, so that few items need few processes.
        self._idle = asyncio.LifoQueue()
        for worker in self._workers:
            self._idle.put_nowait(worker)
        return self

    async def __aexit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.close()
        self._threads.shutdown()

    async def reward(self, item: dict[str, Any], trace: AttemptTrace = NO_ATTEMPT) -> RewardOutcome:
        """Compute the reward of ``item``: a finite number, or an error. Its time is recorded in ``trace``."""
        return await (self._timed(item, trace) if self._is_async else self._run(item, trace))

    async def _timed(self, item: dict[str, Any], trace: AttemptTrace) -> RewardOutcome:
        began_s = time.monotonic()
        with trace.begin("reward") as span:
            outcome = await self._await(item)
            span.set(outcome=outcome.kind or "ok")
        # Verifiers set the CPU time of their commands.
        return replace(outcome, wall_s=time.monotonic() - began_s, cpu_s=span.at.get("cpu_s"))

    async def _await(self, item: dict[str, Any]) -> RewardOutcome:
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                return checked(await cast(Awaitable[Reward], self._function(item)))
        except BaseException as error:  # any error of a reward function costs one sample
            if isinstance(error, asyncio.CancelledError) and is_cancelled():
                raise
            if isinstance(error, TimeoutError) and limit.expired():
                return RewardOutcome(None, "reward_timeout", f"reward_func took longer than {self._timeout_s:g} s")
            return RewardOutcome(None, type(error).__name__, str(error), traceback.format_exc())

    async def _run(self, item: dict[str, Any], trace: AttemptTrace) -> RewardOutcome:
        # The time limit starts when a worker has the item: the wait for a worker is not the function's fault.
        times = _RewardSpans(trace)
        try:
            worker = await self._idle.get()
            running = asyncio.get_running_loop().run_in_executor(self._threads, worker.run, item, times.begin)
            # Even if our caller is cancelled, the worker is idle only once it has answered.
            running.add_done_callback(lambda _: self._idle.put_nowait(worker))
            outcome = await asyncio.shield(running)
            times.end(cpu_s=outcome.cpu_s, wall_s=outcome.wall_s, outcome=outcome.kind or "ok")
        finally:
            times.end()
        return outcome


class _RewardSpans:
    """Spans of the wait for a started worker, then of the reward."""

    def __init__(self, trace: AttemptTrace) -> None:
        self._trace = trace
        self._open = trace.begin("reward_queue")

    def begin(self) -> None:
        """Note that the worker has the item. Called from its thread."""
        if self._open.is_open:
            waited, self._open = self._open, self._trace.begin("reward", up=self._open.up)
            waited.end()

    def end(self, **at: Any) -> None:
        """End the open span: the worker has answered, or the caller was cancelled."""
        self._open.end(**{name: value for name, value in at.items() if value is not None})


def _pickled(function: RewardFunc) -> bytes:
    try:
        return pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise InvalidInput(
            f"reward_func {function!r} cannot be sent to the process of reward functions: {error}",
            hint="define it with def at the top level of a module (no lambda, no inner function), or make it async",
            field="reward_func",
        ) from None


def is_cancelled() -> bool:
    """Whether the current task was cancelled. If not, a ``CancelledError`` comes from user code."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling ``function`` returns a coroutine. Handles partials and objects with an ``async`` ``__call__``."""
    unwrapped = inspect.unwrap(getattr(function, "func", function))
    call = getattr(unwrapped, "__call__", None)  # noqa: B004 - we need the attribute itself
    return inspect.iscoroutinefunction(unwrapped) or inspect.iscoroutinefunction(call)


def checked(returned: object) -> RewardOutcome:
    """Convert what a reward function returned: a finite number, or a mapping with ``reward`` and named parts.

    Numbers may be scalars of numpy and torch; booleans become 0 and 1. Anything else is ``invalid_reward``.
    """
    total, parts = returned, dict[str, float]()
    if isinstance(returned, Mapping):
        if TOTAL not in returned:
            message = f"reward_func must return its total as {TOTAL!r} (got the keys {list(returned)!r:.100})"
            return RewardOutcome(None, "invalid_reward", message)
        total = returned[TOTAL]
        try:
            parts = read_reward_parts({name: value for name, value in returned.items() if name != TOTAL})
        except InvalidInput as error:
            return RewardOutcome(None, "invalid_reward", error.message)
    reward = finite_number(total)
    if reward is None:
        return RewardOutcome(None, "invalid_reward", f"reward_func must return a finite number (got {total!r:.100})")
    return RewardOutcome(reward, parts=parts)


class RewardWorker:
    """One process for rewards. ``run`` blocks its caller. A process that times out or dies is killed and replaced."""

    def __init__(self, pickled_function: bytes, timeout_s: float) -> None:
        self._pickled = pickled_function
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._process: multiprocessing.process.BaseProcess | None = None
        self._connection: Connection[Any, Any] | None = None
        self._is_closed = False

    def run(self, item: dict[str, Any], on_begin: Callable[[], object] = lambda: None) -> RewardOutcome:
        """Compute the reward of ``item``; errors are returned, not raised. Calls ``on_begin`` once the process runs."""
        try:
            connection = self._started()
            on_begin()
            connection.send(item)
            if not connection.poll(self._timeout_s):
                self.kill()
                return RewardOutcome(None, "reward_timeout", f"reward_func took longer than {self._timeout_s:g} s")
            return cast(RewardOutcome, connection.recv())
        except (EOFError, OSError) as error:
            self.kill()
            return RewardOutcome(None, "reward_crashed", f"the process of reward_func died ({error!r})")

    def kill(self) -> None:
        """Kill the process; the next ``run`` starts another."""
        with self._lock:
            process, self._process = self._process, None
            connection, self._connection = self._connection, None
        if process is not None:
            process.kill()
            process.join()
            process.close()
        if connection is not None:
            connection.close()

    def close(self) -> None:
        """Kill the process and start no other."""
        self._is_closed = True
        self.kill()

    def _started(self) -> "Connection[Any, Any]":
        if self._connection is not None:
            return self._connection
        if self._is_closed:
            raise EOFError("closed")
        # Never fork: the run process has threads and an event loop.
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, self._pickled), name="forebay-reward")
        process.start()
        theirs.close()
        with self._lock:
            self._process, self._connection = process, ours
        # `close` may have run while this process was starting in its thread.
        if self._is_closed:
            raise EOFError("closed while it started")
        if not ours.poll(START_TIMEOUT_S):
            raise EOFError(f"not started within {START_TIMEOUT_S:g} s")
        problem = ours.recv()
        if problem:
            raise EOFError(problem)
        return ours


def _serve(connection: "Connection[Any, Any]", pickled: bytes) -> None:
    """Main of a worker: answers items until its parent is gone."""
    # Ctrl+C reaches the whole process group; the parent decides when its workers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _die_with_parent()
    try:
        function: Callable[[dict[str, Any]], Any] = pickle.loads(pickled)  # noqa: S301 - written by our own parent process
    except Exception:  # noqa: BLE001 - importing the user's module may raise anything, which is the answer
        connection.send(traceback.format_exc())
        return
    connection.send("")
    while True:
        try:
            item = connection.recv()
        except EOFError:
            return
        connection.send(_outcome(function, item))


def _die_with_parent() -> None:
    # In a thread, because a hanging function does not notice a closed pipe.
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _outcome(function: Callable[[dict[str, Any]], Any], item: dict[str, Any]) -> RewardOutcome:
    wall_s, cpu_s = time.monotonic(), time.process_time()
    outcome = _checked_reward(function, item)
    return replace(outcome, wall_s=time.monotonic() - wall_s, cpu_s=time.process_time() - cpu_s)


def _checked_reward(function: Callable[[dict[str, Any]], Any], item: dict[str, Any]) -> RewardOutcome:
    try:
        return checked(function(item))
    except BaseException as error:  # noqa: BLE001 - any error, even SystemExit, costs one sample
        return RewardOutcome(None, type(error).__name__, str(error), traceback.format_exc())
