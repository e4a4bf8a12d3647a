"""What a method of a worker says about being called on a whole group."""

import inspect
from collections.abc import Callable
from enum import Enum
from typing import Any, TypedDict, TypeVar

from forebay.core.errors import InvalidInput
from forebay.workers.groups.dispatch import Dispatch, DispatchFunctions, DispatchMode, check_dispatch_mode

REGISTERED = "_forebay_registered"
"""The attribute of a function in which ``register`` leaves what it was given."""

F = TypeVar("F", bound=Callable[..., Any])


class Execute(Enum):
    """Which workers a call runs on."""

    ALL = "all"
    RANK_ZERO = "rank_zero"
    """Arguments as they are, the result as it is."""
    ANY = "any"
    """On the one with the fewest calls in flight; arguments and result as for ``RANK_ZERO``."""


class Registration(TypedDict):
    """What ``register`` was given."""

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
    """Have groups call a method: how its arguments are laid out, on which workers it runs, what a call gives.

    The method itself stays what it is. ``blocking``: a call waits for its values; otherwise it gives a ``Call``.
    ``materialize_futures``: calls among the arguments are waited for by the caller; otherwise the call returns at once,
    and is sent when they have ended. ``deadline_s`` counts from the sending, and covers ``retries``: the same again on
    the rank that raised, or was lost (``ANY`` and ``MAP``: on another one). Raises ``InvalidInput``.
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
                f"{method!r} is no function", hint="put @register directly above `def`, below others", field="method"
            )
        setattr(method, REGISTERED, registration)
        return method

    return attach


def registration_of(cls: type, name: str) -> Registration | None:
    """What a method of a class was registered with. A property is never evaluated."""
    found: Registration | None = getattr(inspect.getattr_static(cls, name, None), REGISTERED, None)
    return found


def registered_methods(cls: type) -> dict[str, Registration]:
    """All of a class, inherited ones too, by name."""
    found = {name: registration_of(cls, name) for name in dir(cls)}
    return {name: registration for name, registration in found.items() if registration is not None}


def _check_limits(deadline_s: object, retries: object) -> None:
    is_number = isinstance(deadline_s, int | float) and not isinstance(deadline_s, bool)
    if deadline_s is not None and not (is_number and deadline_s > 0):  # type: ignore[operator]
        raise InvalidInput(
            f"deadline_s must be above 0, and is {deadline_s!r}", field="deadline_s", hint="seconds, or None"
        )
    if not isinstance(retries, int) or isinstance(retries, bool) or retries < 0:
        raise InvalidInput(f"retries must be a count, and is {retries!r}", field="retries", hint="0 for none")


def _check_execute_mode(dispatch_mode: object, execute_mode: object) -> None:
    if not isinstance(execute_mode, Execute):
        raise InvalidInput(
            f"{execute_mode!r} is no execute mode", field="execute_mode", hint="Execute.ALL, RANK_ZERO or ANY"
        )
    if dispatch_mode is Dispatch.MAP and execute_mode is not Execute.ALL:
        raise InvalidInput("MAP goes over all workers", field="execute_mode", hint="Execute.ALL")
    if execute_mode is Execute.ANY and not isinstance(dispatch_mode, DispatchMode):
        raise InvalidInput(
            "functions that lay arguments out by rank do not fit a call on any one worker",
            field="execute_mode",
            hint="Execute.ALL, or a mode of Dispatch",
        )
