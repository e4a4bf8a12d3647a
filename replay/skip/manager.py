"""``SkipManager``: what a trainer calls, and the way of a decorated call."""

import errno
import functools
import inspect
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

from forebay.core.errors import InvalidInput
from forebay.replay.skip.base import ARGUMENTS, SKIP_REGISTRY, BaseSkip, NoDump
from forebay.replay.skip.config import SkipManagerConfig, read, replace_legacy_flag
from forebay.replay.skip.step_locks import hold, hold_off_loop, off_loop

logger = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])


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
                return await _await_skippable(*eligible, function, args, kwargs)

            return awaited

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            if (eligible := cls._eligible(role, args, kwargs)) is None:
                return function(*args, **kwargs)
            return _call_skippable(*eligible, function, args, kwargs)

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


class _Running(NamedTuple):
    """A call whose function runs: who holds the locks of its step."""

    skip: BaseSkip
    step: int
    locks: frozenset[Path]


_RUNNING: ContextVar[tuple[_Running, ...]] = ContextVar("forebay_skip_running", default=())


def _is_within(skip: BaseSkip, step: int) -> bool:
    """Whether this is called by the function of such a call: its caller's result is what counts, and has the locks."""
    return any(
        each.skip is skip and (each.step == step or not each.locks.isdisjoint(skip.locks(step)))
        for each in _RUNNING.get()
    )


@contextmanager
def _running(skip: BaseSkip, step: int, digests: Mapping[str, str] | None) -> Iterator[None]:
    """While the function runs."""
    running = _RUNNING.set((*_RUNNING.get(), _Running(skip, step, frozenset(skip.locks(step)))))
    arguments = ARGUMENTS.set(digests)
    try:
        yield
    finally:
        ARGUMENTS.reset(arguments)
        _RUNNING.reset(running)


def _call_skippable(skip: BaseSkip, step: int, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    if skip.meet_precondition(step, function, *args, **kwargs):
        with suppress(NoDump):
            return skip.warp_function(step, function, *args, **kwargs)
    if _is_within(skip, step):
        return function(*args, **kwargs)
    with _one_execution(skip, step) as is_made:
        if is_made:
            with suppress(NoDump):
                return skip.warp_function(step, function, *args, **kwargs)
        digests = skip.digest_arguments(function, args, kwargs)
        with _running(skip, step, digests):
            result = function(*args, **kwargs)
            skip.prepare_data(step, result, *args, **kwargs)
        return result


async def _await_skippable(skip: BaseSkip, step: int, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The same for a coroutine function."""
    if await _off_loop(skip.meet_precondition, step, function, *args, **kwargs):
        with suppress(NoDump):
            return await _off_loop(skip.warp_function, step, function, *args, **kwargs)
    if _is_within(skip, step):
        return await function(*args, **kwargs)
    async with _one_execution_off_loop(skip, step) as is_made:
        if is_made:
            with suppress(NoDump):
                return await _off_loop(skip.warp_function, step, function, *args, **kwargs)
        digests = await off_loop(skip.digest_arguments, function, args, kwargs)
        with _running(skip, step, digests):
            result = await function(*args, **kwargs)
            await _off_loop(skip.prepare_data, step, result, *args, **kwargs)
        return result


async def _off_loop(method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    result = await off_loop(method, *args, **kwargs)
    return await result if inspect.isawaitable(result) else result


@contextmanager
def _one_execution(skip: BaseSkip, step: int) -> Iterator[bool]:
    """While False holds, nobody else runs the function for ``step``; True where somebody just has."""
    with ExitStack() as held:
        is_made = False
        for path in skip.locks(step):
            try:
                held.enter_context(hold(path))
            except OSError as error:
                _log_without_locks(error)
            if is_made := skip.has_dump(step):
                break
        # Whoever need not be alone, or has no hope of a dump by now, must not make the others wait.
        if is_made or not skip.locks(step):
            held.close()
        yield is_made


@asynccontextmanager
async def _one_execution_off_loop(skip: BaseSkip, step: int) -> AsyncIterator[bool]:
    """The same for a task."""
    async with AsyncExitStack() as held:
        is_made = False
        for path in skip.locks(step):
            try:
                await held.enter_async_context(hold_off_loop(path))
            except OSError as error:
                _log_without_locks(error)
            if is_made := await off_loop(skip.has_dump, step):
                break
        if is_made or not skip.locks(step):
            await held.aclose()
        yield is_made


_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
"""What file systems say that have none; where nothing can be written at all, the dump itself will tell."""
_logged: set[str] = set()


def _log_without_locks(error: OSError) -> None:
    if error.errno in _NO_LOCKS and str(error) not in _logged:
        _logged.add(str(error))
        logger.warning("a step may be executed more than once: files cannot be locked here: %s", error)
