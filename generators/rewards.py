"""Rewards: reward functions awaited, or run in processes of their own with a time limit."""

import asyncio
import inspect
import os
import pickle
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self, cast

from forebay.core.errors import InvalidInput
from forebay.generators.reward_worker import RewardOutcome, RewardWorker, checked

RewardFunc = Callable[[dict[str, Any]], float | Awaitable[float]]


class Rewarder:
    """Asks a reward function for the reward of an item. Enter it with ``async with``.

    An ``async`` function is awaited; any other runs in one of up to ``num_workers`` processes, since it may hang in
    code that nothing else can stop. After ``timeout_s`` seconds its process is killed and replaced.

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
        # The last one in is the first one out: few items need few processes.
        self._idle = asyncio.LifoQueue()
        for worker in self._workers:
            self._idle.put_nowait(worker)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            worker.close()
        self._threads.shutdown()

    async def reward(self, item: dict[str, Any]) -> RewardOutcome:
        """The reward of ``item``: a finite number, or why there is none."""
        return await (self._await(item) if self._is_async else self._run(item))

    async def _await(self, item: dict[str, Any]) -> RewardOutcome:
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                return checked(await cast(Awaitable[float], self._function(item)))
        except BaseException as error:  # whatever a reward function raises costs one sample
            if isinstance(error, asyncio.CancelledError) and is_cancelled():
                raise
            if isinstance(error, TimeoutError) and limit.expired():
                return RewardOutcome(None, "reward_timeout", f"reward_func took longer than {self._timeout_s:g} s")
            return RewardOutcome(None, type(error).__name__, str(error), traceback.format_exc())

    async def _run(self, item: dict[str, Any]) -> RewardOutcome:
        worker = await self._idle.get()
        running = asyncio.get_running_loop().run_in_executor(self._threads, worker.run, item)
        # Also when our caller is cancelled, the worker is idle only once it has answered.
        running.add_done_callback(lambda _: self._idle.put_nowait(worker))
        return await asyncio.shield(running)


def is_cancelled() -> bool:
    """Whether a ``CancelledError`` is meant for the current task; if not, the user's code leaked one of its own."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling ``function`` gives a coroutine: also for objects with an ``async`` ``__call__``, and partials."""
    unwrapped = inspect.unwrap(getattr(function, "func", function))
    call = getattr(unwrapped, "__call__", None)  # noqa: B004 - its kind is asked, not whether it exists
    return inspect.iscoroutinefunction(unwrapped) or inspect.iscoroutinefunction(call)


def _pickled(function: RewardFunc) -> bytes:
    try:
        return pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise InvalidInput(
            f"reward_func {function!r} cannot be sent to the process that it is to run in: {error}",
            hint="define it with def at the top level of the module (no lambda, no inner function), or make it async",
            field="reward_func",
        ) from None
