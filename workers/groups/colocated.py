"""Several classes of workers in one process each, and a role for each of them."""

from collections.abc import Mapping
from typing import Any

from forebay.core.errors import InvalidInput
from forebay.workers.members.worker import ClassWithInitArgs, Worker


class ColocatedClasses:
    """Classes by role. Of each, every process of the group makes one, in this order; each has the others in ``roles``.

    A group of them has every method as ``role_method``; ``spawn`` gives groups by role.
    """

    def __init__(self, classes: Mapping[str, ClassWithInitArgs[Any]]) -> None:
        if not classes:
            raise InvalidInput(
                "there is no class to colocate", field="class_dict", hint="{role: ClassWithInitArgs(cls, ...)}"
            )
        for role, each in classes.items():
            if not isinstance(role, str) or not role.isidentifier():
                raise InvalidInput(f"{role!r} cannot be a role", field="class_dict", hint="a name, as 'actor'")
            check_class(each, f"class_dict.{role}")
        self.classes = dict(classes)


def create_colocated_worker_cls(class_dict: Mapping[str, ClassWithInitArgs[Any]]) -> ColocatedClasses:
    """What a ``WorkerGroup`` is made with, to have one process hold a worker of each class."""
    return ColocatedClasses(class_dict)


def classes_of(cls_with_init: ClassWithInitArgs[Any] | ColocatedClasses) -> Mapping[str, ClassWithInitArgs[Any]]:
    """Classes by role; a single class has the role ``""``."""
    if isinstance(cls_with_init, ColocatedClasses):
        return cls_with_init.classes
    check_class(cls_with_init, "cls_with_init")
    return {"": cls_with_init}


def check_class(value: object, field: str) -> None:
    """Raise ``InvalidInput`` for what is no worker's class with its arguments."""
    if not isinstance(value, ClassWithInitArgs):
        raise InvalidInput(
            f"{field} is {value!r}", field=field, hint="ClassWithInitArgs(cls, ...): it is made on the worker"
        )
    if not (isinstance(value.cls, type) and issubclass(value.cls, Worker)):
        raise InvalidInput(f"{value.cls!r} is no Worker", field=field, hint="derive the class from Worker")
