"""The classes of a group's workers, one or several in each process, and their methods that the group has."""

import inspect
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from forebay.core.errors import InvalidInput
from forebay.workers.groups.dispatch import (
    PREDEFINED,
    Dispatch,
    DispatchFunctions,
    DispatchMode,
    get_predefined_dispatch_fn,
)
from forebay.workers.groups.register import Execute, Registration, registered_methods, registration_of
from forebay.workers.members.worker import ClassWithInitArgs, Worker

UNREGISTERED = Registration(
    dispatch_mode=Dispatch.ONE_TO_ALL,
    execute_mode=Execute.ALL,
    blocking=False,
    materialize_futures=True,
    deadline_s=None,
    retries=0,
)
"""How ``execute_all`` and similar methods call an unregistered method."""


class ColocatedClasses:
    """Classes by role. Every process of the group constructs one worker of each class, in this order.

    Each worker finds the others in ``roles``. The group has every method as ``role_method``; ``spawn`` makes groups by
    role.
    """

    def __init__(self, class_dict: Mapping[str, ClassWithInitArgs[Any]]) -> None:
        if not class_dict:
            raise InvalidInput(
                "class_dict is empty", field="class_dict", hint="pass {role: ClassWithInitArgs(cls, ...)}"
            )
        for role, each in class_dict.items():
            if not isinstance(role, str) or not role.isidentifier():
                raise InvalidInput(f"{role!r} cannot be a role", field="class_dict", hint="an identifier, as 'actor'")
            _check_class(each, f"class_dict.{role}")
        self.classes = dict(class_dict)


create_colocated_worker_cls = ColocatedClasses
"""Argument for a ``WorkerGroup`` whose processes each hold a worker of every class."""


def classes_of(cls_with_init: ClassWithInitArgs[Any] | ColocatedClasses) -> Mapping[str, ClassWithInitArgs[Any]]:
    """Classes by role; a single class has the role ``""``."""
    if isinstance(cls_with_init, ColocatedClasses):
        return cls_with_init.classes
    _check_class(cls_with_init, "cls_with_init")
    return {"": cls_with_init}


def _check_class(value: object, field: str) -> None:
    """Raise ``InvalidInput`` unless ``value`` is the class of a worker with its arguments."""
    if not isinstance(value, ClassWithInitArgs):
        raise InvalidInput(
            f"{field} must be a ClassWithInitArgs (got {value!r})", field=field, hint="pass ClassWithInitArgs(cls, ...)"
        )
    if not (isinstance(value.cls, type) and issubclass(value.cls, Worker)):
        raise InvalidInput(f"{value.cls!r} is not a Worker", field=field, hint="derive the class from Worker")


@dataclass(frozen=True)
class BoundMethod:
    """A method of the class of one role, and how it is called."""

    role: str
    name: str
    registration: Registration

    @property
    def lays_out(self) -> bool:
        """Whether user functions lay its arguments out."""
        mode = self.registration["dispatch_mode"]
        return not (isinstance(mode, DispatchMode) and mode in PREDEFINED)

    @property
    def is_map(self) -> bool:
        """Whether it iterates over items."""
        return self.registration["dispatch_mode"] is Dispatch.MAP


def functions_of(method: BoundMethod) -> DispatchFunctions:
    """The two functions that its mode has now."""
    mode = method.registration["dispatch_mode"]
    return get_predefined_dispatch_fn(mode) if isinstance(mode, DispatchMode) else mode


def bound_methods(classes: Mapping[str, ClassWithInitArgs[Any]], *, is_prefixed: bool = True) -> dict[str, BoundMethod]:
    """All registered methods by their names on a group: ``method`` or ``role_method``."""
    return {
        f"{role}_{name}" if role and is_prefixed else name: BoundMethod(role, name, registration)
        for role, each in classes.items()
        for name, registration in registered_methods(each.cls).items()
    }


def any_method(classes: Mapping[str, ClassWithInitArgs[Any]], name: str) -> BoundMethod:
    """A method by its name, registered or not. Raises ``AttributeError`` if there is none."""
    for role, method in _readings(classes, name):
        cls = classes[role].cls
        # Static, so that a property is not evaluated.
        if inspect.isroutine(inspect.getattr_static(cls, method, None)):
            return BoundMethod(role, method, registration_of(cls, method) or UNREGISTERED)
    raise AttributeError(f"{_names(classes)} has no method {name}")


def missing(classes: Mapping[str, ClassWithInitArgs[Any]], name: str, known: Collection[str]) -> AttributeError:
    """The error for a name that a group does not have."""
    for role, method in _readings(classes, name):
        if inspect.isroutine(inspect.getattr_static(classes[role].cls, method, None)):
            return AttributeError(
                f"{classes[role].cls.__name__}.{method} is not registered: put @register(...) above it, and the group"
                f" calls it on its workers (execute_all_sync({name!r}) does once)"
            )
    return AttributeError(
        f"a group of {_names(classes)} has no {name!r}; its methods with @register: {', '.join(known) or 'none'}"
    )


def check_not_hidden(names: Collection[str], taken: type) -> None:
    """Raise ``InvalidInput`` for a name that the group's own class uses."""
    for name in names:
        if hasattr(taken, name):
            raise InvalidInput(
                f"{name!r} cannot be a method of a group's workers: the group's own {name!r} would be hidden",
                field=name,
                hint="give the method, or the role, another name",
            )


def _readings(classes: Mapping[str, ClassWithInitArgs[Any]], name: str) -> Iterator[tuple[str, str]]:
    """Possible meanings of ``method`` or ``role_method``: pairs of role and method."""
    if "" in classes:
        yield "", name
    elif len(classes) == 1:
        yield next(iter(classes)), name
    for role in classes:
        if role and name.startswith(f"{role}_"):
            yield role, name.removeprefix(f"{role}_")


def _names(classes: Mapping[str, ClassWithInitArgs[Any]]) -> str:
    return ", ".join(each.cls.__name__ for each in classes.values())
