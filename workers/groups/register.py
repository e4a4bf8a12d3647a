"""Registration of a worker's method: how groups call it."""

import inspect
from collections.abc import Callable
from enum import Enum
from typing import Any, TypedDict, TypeVar

from forebay.core.errors import InvalidInput
from forebay.workers.groups.dispatch import Dispatch, DispatchFunctions, DispatchMode, check_dispatch_mode

REGISTERED = "_forebay_registered"
"""Attribute of a function in which ``register`` stores its arguments."""

F = TypeVar("F", bound=Callable[..., Any])


class Execute(Enum):
    """Which workers a call runs on."""

    ALL = "all"
    RANK_ZERO = "rank_zero"
    """On rank 0, with unchanged arguments and result."""
    ANY = "any"
    """On the worker with the fewest calls in flight; arguments and result as for ``RANK_ZERO``."""


class Registration(TypedDict):
    """Arguments of ``register``."""

    dispatch_mode: DispatchMode | DispatchFunctions
    execute_mode: Execute
    blocking: bool
    materialize_futures: bool
    deadline_s: float | None
    retries: int


def register(
    dispatch_mode: DispatchMode | DispatchFunctions = Dispatch.ALL_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
    materialize_futures: bool = True,
    *,
    deadline_s: float | None = None,
    retries: int = 0,
) -> Callable[[F], F]:
    """Register a method with groups: the layout of its arguments, the workers it runs on, and what a call returns.

    The method itself is unchanged. ``blocking``: a call waits for its values; otherwise it returns a ``Call``.
    ``materialize_futures``: the caller waits for calls among the arguments; otherwise the call returns at once and is
    sent when they have ended. ``deadline_s`` counts from sending and includes ``retries``, which repeat a call on the
    rank that raised or was lost (``ANY`` and ``MAP``: on another rank). Raises ``InvalidInput``.
    """
    check_dispatch_mode(dispatch_mode)
    _check_execute_mode(dispatch_mode, execute_mode)
    _check_limits(deadline_s, retries)
    registration = Registration(
        dispatch_mode=dispatch_mode,
        execute_mode=execute_mode,
        blocking=blocking,
        materialize_futures=materialize_futures,
        deadline_s=deadline_s,
        retries=retries,
    )

    def attach(method: F) -> F:
        if not inspect.isfunction(method):
            raise InvalidInput(
                f"{method!r} is not a function", hint="put @register directly above `def`, below others", field="method"
            )
        setattr(method, REGISTERED, registration)
        return method

    return attach


def registration_of(cls: type, name: str) -> Registration | None:
    """Registration of a method of a class, or None. Properties are never evaluated."""
    found: Registration | None = getattr(inspect.getattr_static(cls, name, None), REGISTERED, None)
    return found


def registered_methods(cls: type) -> dict[str, Registration]:
    """Registrations of a class by method name, including inherited methods."""
    found = {name: registration_of(cls, name) for name in dir(cls)}
    return {name: registration for name, registration in found.items() if registration is not None}


def _check_limits(deadline_s: object, retries: object) -> None:
    is_number = isinstance(deadline_s, int | float) and not isinstance(deadline_s, bool)
    if deadline_s is not None and not (is_number and deadline_s > 0):  # type: ignore[operator]
        raise InvalidInput(
            f"deadline_s must be above 0 (got {deadline_s!r})", field="deadline_s", hint="use seconds, or None"
        )
    if not isinstance(retries, int) or isinstance(retries, bool) or retries < 0:
        raise InvalidInput(f"retries must be a count (got {retries!r})", field="retries", hint="use 0 for none")


def _check_execute_mode(dispatch_mode: object, execute_mode: object) -> None:
    if not isinstance(execute_mode, Execute):
        raise InvalidInput(
            f"{execute_mode!r} is not an execute mode", field="execute_mode", hint="Execute.ALL, RANK_ZERO or ANY"
        )
    if dispatch_mode is Dispatch.MAP and execute_mode is not Execute.ALL:
        raise InvalidInput("MAP runs on all workers", field="execute_mode", hint="use Execute.ALL")
    if execute_mode is Execute.ANY and not isinstance(dispatch_mode, DispatchMode):
        raise InvalidInput(
            "Execute.ANY calls one worker, so dispatch functions that lay arguments out by rank cannot be used",
            field="execute_mode",
            hint="use Execute.ALL, or a mode of Dispatch",
        )
