"""``SkipManager``: the interface for trainers, and the handling of decorated calls."""

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
"""How often the log reports a lock that a call is waiting for."""

Function = TypeVar("Function", bound=Callable[..., Any])
T = TypeVar("T")


class SkipManager:
    """The process-wide state: which roles are skipped, and the trainer's step."""

    config: ClassVar[SkipManagerConfig | None] = None
    step: ClassVar[int] = -1
    """The trainer's step, for roles without ``support_online_step``; -1 before the first."""
    skip_instances: ClassVar[Mapping[str, BaseSkip]] = {}
    """One instance per role that is registered and configured."""

    @classmethod
    def init(cls, config: Any) -> None:
        """Read ``config.skip`` and reset the step. Raises ``InvalidInput`` and changes nothing then."""
        made = SkipManagerConfig.of(config, {role: kind.config_class for role, kind in SKIP_REGISTRY.items()})
        instances = {role: SKIP_REGISTRY[role](of_role, config) for role, of_role in made.roles.items()}
        rollout = instances.get("rollout")
        replace_legacy_flag(config, is_replaced=rollout is not None and rollout.is_enabled())
        cls.config, cls.step, cls.skip_instances = made, -1, instances
        _logged.clear()

    @classmethod
    def set_step(cls, step: int) -> None:
        """Set the trainer's current step. Raises ``InvalidInput``."""
        if isinstance(step, bool) or not hasattr(step, "__index__"):
            raise InvalidInput(f"step must be an integer (got {step!r})", field="step")
        cls.step = step.__index__()

    @classmethod
    def annotate(cls, role: str) -> Callable[[Function], Function]:
        """Decorate a function or method, sync or async, whose calls ``role`` may skip.

        Raises ``InvalidInput`` for a role without a class; the decorator raises it for anything but such a function.
        """
        if role not in SKIP_REGISTRY:
            known = ", ".join(sorted(SKIP_REGISTRY))
            raise InvalidInput(f"no class is registered for the role {role!r}; known: {known}", field="role")

        def decorate(function: Function) -> Function:
            return cast("Function", cls._decorated(role, function))

        return decorate

    @classmethod
    def _decorated(cls, role: str, function: Any) -> Any:
        if isinstance(function, staticmethod | classmethod):
            return type(function)(cls._decorated(role, function.__func__))
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise InvalidInput(f"{function.__name__} is a generator, which cannot be skipped", field="function")
        if not callable(function) or isinstance(function, type):
            raise InvalidInput(f"{function!r} is not a function", field="function")
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
        """The instance that may skip this call, and the step; None to call the function without any skipping."""
        if cls._should_bypass_for_validation(args, kwargs):
            return None
        skip = cls.skip_instances.get(role)
        if skip is None or not skip.is_enabled():
            return None
        step = skip.extract_step(*args, **kwargs) if skip.support_online_step else cls.step
        return (skip, step) if step in skip.steps else None

    @staticmethod
    def _should_bypass_for_validation(args: Any, kwargs: Any) -> bool:
        """Whether an argument has prompts of a validation, which is never skipped."""
        return any(bool(read(each, "meta_info.validate")) for each in (*args, *kwargs.values()))


class _Here:
    """Skips a plain function, entirely in the calling thread, so that no ``await`` ever suspends."""

    async def call(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the role's class."""
        return function(*args, **kwargs)

    run = call
    """Call the decorated function."""

    async def pause(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 - no event loop runs this

    def queue(self, path: Path) -> AbstractAsyncContextManager[None]:  # noqa: ARG002 - threads ask side by side
        """Enter this before acquiring the lock at ``path``."""
        return nullcontext()


def _finish(call: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that never suspends."""
    try:
        call.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("it waits")


class _Threads:
    """Skips a coroutine function; file access runs off the event loop."""

    async def call(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        task = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
        try:
            result = await asyncio.shield(task)
        except asyncio.CancelledError:
            # The lock must not be released while a thread still writes under it.
            await asyncio.wait([task])
            if not task.cancelled():
                task.exception()  # retrieved, or asyncio would warn about it
            raise
        return await result if inspect.isawaitable(result) else result

    async def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return await function(*args, **kwargs)

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def queue(self, path: Path) -> AbstractAsyncContextManager[None]:
        """Lets only one task per event loop acquire the lock at ``path``; the others wait here."""
        return _queues.setdefault((id(asyncio.get_running_loop()), path), asyncio.Lock())


_queues: "weakref.WeakValueDictionary[tuple[int, Path], asyncio.Lock]" = weakref.WeakValueDictionary()


_RUNNING: ContextVar[frozenset[object]] = ContextVar("forebay_skip_running", default=frozenset())
"""Steps and locks of the enclosing calls, which already hold these locks and whose results are the ones dumped."""


async def _skip_or_call(
    way: _Here | _Threads, skip: BaseSkip, step: int, function: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Skip or run a call on a listed step, and return its result."""
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
            # Release the lock if it is no longer needed, so that other calls need not wait.
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
    """Hold the lock at ``path`` across threads and processes. Without file locks, continue unlocked."""
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
    """Poll for the lock. A thread blocked on it would be missing from the pool that the holder may need."""
    backoff, began_s = Backoff(0.01, 0.25), time.monotonic()
    logged_s = began_s
    await way.call(make_folder_durably, path.parent)
    while not await way.call(_try_acquire, lock):
        now_s = time.monotonic()
        if now_s - logged_s >= LOGGED_EVERY_S:
            logger.warning("waiting for %s for %.0f s: another call holds it", path, now_s - began_s)
            logged_s = now_s
        await way.pause(backoff.next_s())


def _try_acquire(lock: FileLock) -> bool:
    try:
        lock.acquire(blocking=False)
    except Timeout:
        return False
    return True


_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
"""Errors of file systems without locks. If nothing can be written at all, the dump itself reports it."""
_logged: set[str] = set()


def _log_without_locks(error: OSError) -> None:
    if error.errno in _NO_LOCKS and str(error) not in _logged:
        _logged.add(str(error))
        logger.warning("files cannot be locked here, so a step may be executed more than once: %s", error)
