"""The base class of workers, and a class with the arguments to construct it on the worker."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Generic, TypeVar


class Worker:
    """One member of a group. A subclass marks the methods that the group has with ``register``.

    Rank and the other attributes are set before the constructor runs; a subclass need not call ``super().__init__()``.
    An instance made directly, as in a unit test, is the only one of its group.
    """

    rank: int = 0
    """0 to ``world_size`` - 1."""
    world_size: int = 1
    """Workers of the group."""
    local_rank: int = 0
    """0 to ``local_world_size`` - 1, among the workers on the same machine."""
    local_world_size: int = 1
    """Workers of the group on the same machine."""
    node: str = "localhost"
    """Name of the machine."""
    roles: Mapping[str, Any] = MappingProxyType({})
    """The workers of the other roles in this process, if several classes share one."""


W = TypeVar("W", bound=Worker)


class ClassWithInitArgs(Generic[W]):
    """``cls(*args, **kwargs)``, constructed later, in the process of the worker."""

    def __init__(self, cls: type[W], *args: Any, **kwargs: Any) -> None:
        self.cls = cls
        self.args: tuple[Any, ...] = args
        self.kwargs: Mapping[str, Any] = kwargs

    def make(self, **attributes: Any) -> W:
        """Construct the worker, with these attributes of a ``Worker`` set before its constructor runs."""
        worker = self.cls.__new__(self.cls)
        vars(worker).update(attributes)
        worker.__init__(*self.args, **self.kwargs)  # type: ignore[misc]
        return worker
