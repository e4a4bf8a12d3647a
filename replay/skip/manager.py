"""``SkipManager``: what a trainer calls, and the way of a decorated call."""

import asyncio
import errno
import functools
import inspect
import logging
import time
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
    suppress,
)
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

from filelock import FileLock, Timeout

from forebay.core.backoff import Backoff
from forebay.core.errors import InvalidInput
from forebay.core.files import FILE_MODE, make_folder_durably
from forebay.replay.skip.base import ARGUMENTS, SKIP_REGISTRY, BaseSkip, NoDump
from forebay.replay.skip.config import SkipManagerConfig, read, replace_legacy_flag

logger = logging.getLogger(__name__)

LOGGED_EVERY_S = 30.0
"""How often a log line names the lock that is waited for."""

Function = TypeVar("Function", bound=Callable[..., Any])
T = TypeVar("T")


class SkipManager:
    """The one of a process: which roles are skipped, and the step of its trainer."""

    config: ClassVar[SkipManagerConfig | None] = None
    step: ClassVar[int] = -1
    """The trainer's step, for roles without ``support_online_step``; -1 before the first."""
    skip_instances: ClassVar[Mapping[str, BaseSkip]] = {}
    """One for each role that is registered and configured."""

    @classmethod
    def init(cls, config: Any) -> None:
        """Read ``config.skip``, and begin anew with it. Raises ``InvalidInput``, and is then as it was before."""
        made = SkipManagerConfig.of(config, {role: kind.config_class for role, kind in SKIP_REGISTRY.items()})
        instances = {role: SKIP_REGISTRY[role](of_role, config) for role, of_role in made.roles.items()}
        rollout = instances.get("rollout")
        replace_legacy_flag(config, is_replaced=rollout is not None and rollout.is_enabled())
        cls.config, cls.step, cls.skip_instances = made, -1, instances
        _logged.clear()

    @classmethod
    def set_step(cls, step: int) -> None:
        """Say which step the trainer is at. Raises ``InvalidInput``."""
        if isinstance(step, bool) or not hasattr(step, "__index__"):
            raise InvalidInput(f"{step!r} is no step: an integer", field="step")
        cls.step = step.__index__()

    @classmethod
    def annotate(cls, role: str) -> Callable[[Function], Function]:
        """The decorator of a function or method, sync or async, whose calls ``role`` may skip.

        Raises ``InvalidInput`` for a role that has no class, and at the decoration of what is no such function.
        """
        if role not in SKIP_REGISTRY:
            known = ", ".join(sorted(SKIP_REGISTRY))
            raise InvalidInput(f"nothing is registered for the role {role!r}; known: {known}", field="role")

        def decorate(function: Function) -> Function:
            return cast("Function", cls._decorated(role, function))

        return decorate

    @classmethod
    def _decorated(cls, role: str, function: Any) -> Any:
        if isinstance(function, staticmethod | classmethod):
            return type(function)(cls._decorated(role, function.__func__))
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise InvalidInput(f"{function.__name__} is a generator: its calls return nothing yet", field="function")
        if not callable(function) or isinstance(function, type):
            raise InvalidInput(f"{function!r} is no function", field="function")
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):

            @functools.wraps(function)
            async def awaited(*args: Any, **kwargs: Any) -> Any:
                if (eligible := cls._eligible(role, args, kwargs)) is None:
                    return await function(*args, **kwargs)
                return await _skip_or_call(_Threads(), *eligible, function, args, kwargs)

            return awaited

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            if (eligible := cls._eligible(role, args, kwargs)) is None:
                return function(*args, **kwargs)
            return _finish(_skip_or_call(_Here(), *eligible, function, args, kwargs))

        return called

    @classmethod
    def _eligible(cls, role: str, args: Any, kwargs: Any) -> tuple[BaseSkip, int] | None:
        """Who may skip this call, and its step; None where the function is called as if it had no decorator."""
        if cls._should_bypass_for_validation(args, kwargs):
            return None
        skip = cls.skip_instances.get(role)
        if skip is None or not skip.is_enabled():
            return None
        step = skip.extract_step(*args, **kwargs) if skip.support_online_step else cls.step
        return (skip, step) if step in skip.steps else None

    @staticmethod
    def _should_bypass_for_validation(args: Any, kwargs: Any) -> bool:
        """Whether the prompts among the arguments are of a validation, which is never skipped."""
        return any(bool(read(each, "meta_info.validate")) for each in (*args, *kwargs.values()))


class _Here:
    """How a plain function is skipped: all of it in the thread of the call, so that no ``await`` ever waits."""

    async def call(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a method of a role's class."""
        return function(*args, **kwargs)

    run = call
    """Call the function that is decorated."""

    async def pause(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 - no event loop runs this

    def queue(self, path: Path) -> AbstractAsyncContextManager[None]:  # noqa: ARG002 - threads ask side by side
        """Entered before the lock at ``path`` is asked for."""
        return nullcontext()


def _finish(call: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that waits for nothing."""
    try:
        call.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("it waits")


class _Threads:
    """How a coroutine function is skipped: what reads and writes files is off the event loop."""

    async def call(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        task = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
        try:
            result = await asyncio.shield(task)
        except asyncio.CancelledError:
            # A lock must not be given back while a thread still writes under it.
            await asyncio.wait([task])
            if not task.cancelled():
                task.exception()  # looked at: asyncio would complain of an exception that nobody saw
            raise
        return await result if inspect.isawaitable(result) else result

    async def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return await function(*args, **kwargs)

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def queue(self, path: Path) -> AbstractAsyncContextManager[None]:
        """Of the tasks of one event loop that wait for ``path``, one asks for the lock."""
        return _queues.setdefault((id(asyncio.get_running_loop()), path), asyncio.Lock())


_queues: "weakref.WeakValueDictionary[tuple[int, Path], asyncio.Lock]" = weakref.WeakValueDictionary()


_RUNNING: ContextVar[frozenset[object]] = ContextVar("forebay_skip_running", default=frozenset())
"""The steps and the locks of the calls around this one: their results are what counts, and they have the locks."""


async def _skip_or_call(
    way: _Here | _Threads, skip: BaseSkip, step: int, function: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """What a call for a listed step returns."""
    if await way.call(skip.meet_precondition, step, function, *args, **kwargs):
        with suppress(NoDump):
            return await way.call(skip.warp_function, step, function, *args, **kwargs)
    path = skip.lock_path(step)
    running = {(skip, step), path} - {None}
    if not running.isdisjoint(_RUNNING.get()):
        return await way.run(function, *args, **kwargs)
    async with AsyncExitStack() as held:
        if path is not None:
            await held.enter_async_context(_locked(way, path))
            has_dump = await way.call(skip.has_dump, step)
            # Whoever need not be alone, or has no hope of a dump by now, must not make the others wait.
            if has_dump or skip.lock_path(step) is None:
                await held.aclose()
            if has_dump:
                with suppress(NoDump):
                    return await way.call(skip.warp_function, step, function, *args, **kwargs)
        digests = await way.call(skip.digest_arguments, function, args, kwargs)
        with _set(_RUNNING, _RUNNING.get() | running), _set(ARGUMENTS, digests):
            result = await way.run(function, *args, **kwargs)
            await way.call(skip.prepare_data, step, result, *args, **kwargs)
        return result


@contextmanager
def _set(variable: ContextVar[T], value: T) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@asynccontextmanager
async def _locked(way: _Here | _Threads, path: Path) -> AsyncIterator[None]:
    """Have ``path`` locked, over threads and processes; where files cannot be locked, without."""
    lock = FileLock(path, mode=FILE_MODE, thread_local=False)
    async with way.queue(path):
        try:
            try:
                await _acquire(way, lock, path)
            except OSError as error:
                _log_without_locks(error)
            yield
        finally:
            await way.call(lock.release)


async def _acquire(way: _Here | _Threads, lock: FileLock, path: Path) -> None:
    """Asks again and again: a thread that waited would be one less for what the holder has to do."""
    backoff, began_s = Backoff(0.01, 0.25), time.monotonic()
    logged_s = began_s
    await way.call(make_folder_durably, path.parent)
    while not await way.call(_try_acquire, lock):
        now_s = time.monotonic()
        if now_s - logged_s >= LOGGED_EVERY_S:
            logger.warning("waiting for %s for %.0f s: another call has it", path, now_s - began_s)
            logged_s = now_s
        await way.pause(backoff.next_s())


def _try_acquire(lock: FileLock) -> bool:
    try:
        lock.acquire(blocking=False)
    except Timeout:
        return False
    return True


_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
"""What file systems say that have none; where nothing can be written at all, the dump itself will tell."""
_logged: set[str] = set()


def _log_without_locks(error: OSError) -> None:
    if error.errno in _NO_LOCKS and str(error) not in _logged:
        _logged.add(str(error))
        logger.warning("a step may be executed more than once: files cannot be locked here: %s", error)
